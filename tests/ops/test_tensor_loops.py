"""The loops over lists of tensors: those of the library answer as those of Python."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ampctx.kernels import handles, ops, tensor_loops

# More than the loops look ahead.
COUNT = 100


def python():
    """The module as it is without the library."""
    spec = importlib.util.spec_from_file_location("passes_of_python", tensor_loops.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LIBRARY, PYTHON = SimpleNamespace(**vars(tensor_loops)), python()
either = pytest.mark.parametrize("side", [LIBRARY, PYTHON], ids=["library", "python"])


def test_the_library_has_the_passes():
    """Else the tests of this file compare Python with itself."""
    assert all(getattr(tensor_loops, name) is function for name, function in handles.extension.passes.items())
    assert len(handles.extension.passes) > 5


def test_the_passes_look_ahead():
    """Else torch has its objects in another way than csrc/prefetch.h expects, and passes over many tensors are slow."""
    assert handles.read([torch.ones(1)]) is not None
    assert tensor_loops.bump_each([torch.ones(1)])


def params(count=COUNT):
    return [nn.Parameter(torch.full((3,), float(i))) for i in range(count)]


class OwnGrad(nn.Parameter):
    @property
    def grad(self):
        return torch.ones(3)

    @grad.setter
    def grad(self, value):
        self.was_set = value


@either
@pytest.mark.parametrize(
    "other",
    [torch._neg_view(torch.ones(3)), torch.ones(3, dtype=torch.complex64).conj(), torch._efficientzerotensor(3)],
    ids=["negated", "conjugated", "zero"],
)
def test_values_that_are_not_those_in_memory_are_seen(side, other):
    tensors = [*params(), torch.ones(2, dtype=torch.complex64), nn.Parameter(torch.ones(3)), torch.ones(())]
    assert side.are_resolved(tensors)
    assert not side.are_resolved([*tensors, other])
    assert not side.are_resolved([nn.Parameter(other), *tensors])
    # The library does not know the type.
    assert side.all_resolved([*tensors, OwnGrad(torch.ones(3))])
    assert not side.all_resolved([*tensors, OwnGrad(other)])


@either
def test_gradients_are_looked_for_and_cleared(side):
    tensors = [*params(), nn.Parameter(torch.ones(3)), OwnGrad(torch.ones(3))]
    assert side.have_no_grad(tensors, True)
    assert not side.have_no_grad(tensors, False)  # that of OwnGrad
    assert side.have_no_grad(tensors[:-1], False)
    for tensor in (tensors[0], tensors[COUNT - 1], tensors[COUNT]):
        tensor.grad = torch.ones(3)
        assert not side.have_no_grad(tensors[:-1], True)
        assert not side.have_no_grad(tensors[:-1], False)
        side.clear_grads(tensors, False)
        assert tensor.grad is None
    assert tensors[-1].was_set is None
    tensors[COUNT].grad, tensors[-1].was_set = torch.ones(3), 1
    side.clear_grads(tensors, True)
    assert tensors[COUNT].grad is None
    assert tensors[-1].was_set is None
    assert side.have_no_grad([], False)


@either
@pytest.mark.parametrize("stored", [True, False])
def test_what_is_no_tensor_has_no_gradient_to_look_for(side, stored):
    with pytest.raises((AttributeError, TypeError)):
        side.have_no_grad([*params(), None], stored)
    with pytest.raises(AttributeError):
        side.clear_grads([*params(), None], stored)


def _again(mapping):
    """The same entries in another order."""
    mapping.update([(key := next(iter(mapping)), mapping.pop(key))])


_CHANGES = {
    "nothing": lambda groups, state, models, lazy: None,
    "group": lambda groups, state, models, lazy: groups.append(dict(groups[0])),
    "fewer-groups": lambda groups, state, models, lazy: groups.pop(),
    "member": lambda groups, state, models, lazy: groups[1]["params"].pop(),
    "other-member": lambda groups, state, models, lazy: groups[0]["params"].__setitem__(3, nn.Parameter(torch.ones(3))),
    "border": lambda groups, state, models, lazy: groups[0]["params"].append(groups[1]["params"].pop(0)),
    "state": lambda groups, state, models, lazy: state.update({next(iter(state)): {}}),
    "order-of-state": lambda groups, state, models, lazy: _again(state),
    "entry": lambda groups, state, models, lazy: state[next(iter(state))].update(m=torch.ones(1)),
    "no-entry": lambda groups, state, models, lazy: state[next(reversed(state))].clear(),
    "model": lambda groups, state, models, lazy: models.popitem(),
    "more-models": lambda groups, state, models, lazy: models.update({groups[0]["params"][9]: torch.ones(3)}),
    "lazy": lambda groups, state, models, lazy: lazy.pop(),
    "other-lazy": lambda groups, state, models, lazy: lazy.__setitem__(-1, nn.Parameter(torch.ones(3))),
    "idle": lambda groups, state, models, lazy: setattr(groups[0]["params"][0], "grad", torch.ones(3)),
}


@either
@pytest.mark.parametrize("change", _CHANGES)
def test_a_step_sees_what_has_changed_since_the_last_one(side, change):
    tensors = params()
    groups = [{"params": tensors[:30]}, {"params": tensors[30:]}]
    state = {p: {"m": torch.ones(1)} for p in tensors[1:]}
    models, lazy = {p: torch.ones(3) for p in tensors[1:5]}, tensors[1:5]
    kept = [list(groups), side.members_of(groups), list(state), list(state.values())]
    kept += [list(models), list(models.values()), list(lazy)]
    kept += [tensors[:1], list(state.values()), ["m"], [[entries["m"] for entries in state.values()]], [], [], []]
    _CHANGES[change](groups, state, models, lazy)
    assert bool(side.same_plan(kept, groups, state, models, lazy)) == (change == "nothing")


def test_lists_that_are_none_are_not_the_same():
    """The caller looks at them with Python then, and says what is wrong."""
    tensors = params(2)
    for wrong in (None, 3, tuple(tensors), {}, iter(tensors)):
        assert not LIBRARY.same_items(wrong, tensors)
        assert not LIBRARY.same_items(tensors, wrong)
        assert not LIBRARY.same_members(wrong, tensors)
        assert not LIBRARY.same_members([{"params": tensors}], wrong)
        assert not LIBRARY.same_members([wrong], [tensors])
        assert not LIBRARY.same_members([{"params": wrong}], [tensors])
        assert not LIBRARY.same_plan([[], [], [], [], [], [], [], [], [wrong], ["a"], [[1]]], [], {}, {}, [])
        assert not LIBRARY.same_plan([[], [], [], [], [], [], [], [], wrong, ["a"], [[1]]], [], {}, {}, [])
        assert not LIBRARY.same_plan([[], [], wrong, [], [], [], [], []], [], {}, {}, [])
    torch.ones(1).sum().item()  # no exception is left behind


@either
@pytest.mark.parametrize("count", [0, 1, 512, 1300])
def test_each_version_is_bumped_once(side, count):
    tensors = [torch.ones(1) for _ in range(count)]
    side.bump_versions(tuple(tensors))
    assert [t._version for t in tensors] == [1] * count


@either
def test_versions_of_all_kinds_of_tensors_are_bumped(side):
    class Mine(torch.Tensor):
        pass

    whole = torch.ones(4)
    tensors = [
        *params(3),
        nn.Parameter(torch.ones(3)),
        torch.ones(3).as_subclass(Mine),
        whole[1:],
        OwnGrad(torch.ones(3)),
    ]
    former = [t._version for t in tensors]
    side.bump_versions(tensors)
    assert [t._version for t in tensors] == [version + 1 for version in former]
    assert whole._version == former[5] + 1
    weight = tensors[0]
    loss = (weight * weight).sum()
    side.bump_versions([weight])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@either
def test_a_tensor_of_inference_mode_has_no_version(side):
    with torch.inference_mode():
        tensor = torch.ones(3)
    other = torch.ones(3)
    side.bump_versions([other, tensor])
    assert other._version == 1


def test_gradients_of_a_backward_are_seen_and_gone():
    tensors = params(3)
    assert tensor_loops.have_no_grad(tensors, False)
    sum(p.sum() for p in tensors[1:]).backward()
    assert not tensor_loops.have_no_grad(tensors, False)
    assert tensor_loops.have_no_grad(tensors[:1], False)
    for p in tensors:
        p.grad = None
    assert tensor_loops.have_no_grad(tensors, False)
    with torch.no_grad():
        assert tensor_loops.have_no_grad([torch.ones(3), tensors[0][1:]], False)


def test_entries_of_dicts_are_read():
    dicts = [{"a": torch.full((3,), float(i)), "b": 1} for i in range(COUNT)]
    read = handles.read_entries(dicts, "a")
    assert all(mine is entries["a"] for mine, entries in zip(read, dicts, strict=True))
    assert ops.multi_tensor_l2norm(read, torch.zeros(()))[0] == torch.cat(list(read)).norm()
    assert handles.read_entries(dicts, "b") is None
    assert handles.read_entries(dicts, "c") is None
    assert handles.read_entries([*dicts, {}], "a") is None
    assert handles.read_entries([*dicts, None], "a") is None
    torch.ones(1).sum().item()
