"""Lists that are read as Python has them: calls with them are those with the tensors; what cannot be read is not."""

from __future__ import annotations

import dataclasses
import gc
import operator
import re
import weakref
from typing import NamedTuple

import pytest
import torch
from backends import ALL_FLOATS, COMPILED, EMULATED, short
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ampctx import AmpTypeError, foreach, optimizer_ops
from ampctx.foreach import FoundInf
from ampctx.kernels import handles, ops
from ampctx.ops import ReadTensors

SIZES = [3, 0, (2, 5), 5000, 1, ()]


def test_lists_can_be_read_here():
    """Else everything works, and slower: the other tests of this file would not tell."""
    assert handles.read([torch.ones(3)]) is not None


class Held(NamedTuple):
    number: int


@pytest.mark.parametrize("backend", [COMPILED, EMULATED], indirect=True, ids=lambda b: b.name)
@pytest.mark.parametrize("dtype", ALL_FLOATS, ids=short)
def test_ops_give_the_same(backend, dtype):
    if not backend.serves(dtype):
        return
    tensors = backend.randn(SIZES, dtype)
    out = backend.randn(SIZES, dtype, seed=1)
    half, other = torch.tensor(0.5), torch.tensor(0.25, dtype=torch.float64)
    # Lists that were read are known to the library of the package, which is not that of the emulation.
    know = handles.read if backend is COMPILED else lambda t: Held(backend.ops.hold_tensors.default(t))
    x, y = know(tensors), know(out)
    expected = [t.clone() for t in out]
    backend.axpby(tensors, expected, expected, backend.flag(), half, other)
    backend.ops.multi_tensor_axpby.held(x.number, y.number, y.number, backend.flag(), half, other, -1)
    assert all(map(torch.equal, out, expected))
    for per_tensor in (False, True):
        norms = backend.ops.multi_tensor_unscale_l2norm.held(x.number, backend.flag(), half, per_tensor)
        assert all(map(torch.equal, norms, backend.l2norm(tensors, backend.flag(), half, per_tensor)))
        norms = backend.ops.multi_tensor_l2norm.held(x.number, backend.flag(), per_tensor)
        assert all(map(torch.equal, norms, backend.l2norm(tensors, backend.flag(), None, per_tensor)))
    backend.scale(tensors, expected, backend.flag(), half)
    backend.ops.multi_tensor_scale.held(x.number, x.number, backend.flag(), half)
    assert all(map(torch.equal, tensors, expected))


def test_step_counts_that_were_read_go_with_any_lists():
    """Also where another list of the call has an empty tensor, and is checked one tensor after the other."""
    results = []
    for read in (False, True):
        grads, params, moments = ([torch.ones(n) for n in (3, 0, 5)] for _ in range(3))
        steps = [torch.zeros(()) for _ in params]
        given = [handles.read(tensors) if read else tensors for tensors in (grads, params, moments, steps)]
        flag = torch.zeros(())
        optimizer_ops.lion(*given[:3], [], given[3], flag, 1.0, 0.1, beta1=0.9, beta2=0.99)
        assert [t.item() for t in steps] == [1.0] * 3
        results.append(params)
    assert all(map(torch.equal, *results))
    with pytest.raises(RuntimeError, match=re.escape("steps[0] was read for one call and is no scalar")):
        optimizer_ops.lion(*given[:3], [], handles.read([torch.ones(2)] * 3), flag, 1.0, 0.1, beta1=0.9, beta2=0.99)


def test_thousands_of_tensors_are_checked_in_parallel_as_alone():
    """More than one thread's share, with what is refused in the last place."""
    tensors = [torch.full((3,), float(i)) for i in range(3000)]
    ops.multi_tensor_scale(tensors, tensors, torch.zeros(()), 2.0)
    assert [t[0].item() for t in tensors] == [2.0 * i for i in range(3000)]
    with pytest.raises(RuntimeError, match=r"multi_tensor_scale: dst\[2999\] has 2 elements, src\[2999\] has 3"):
        ops.multi_tensor_scale(tensors, [*tensors[:-1], torch.zeros(2)], torch.zeros(()), 2.0)
    with pytest.raises(RuntimeError, match=r"multi_tensor_scale: src\[2999\] has dtype torch.float64, src\[0\] has"):
        ops.multi_tensor_scale([*tensors[:-1], torch.zeros(3).double()], tensors, torch.zeros(()), 2.0)
    tensors[7].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"multi_tensor_scale: src\[7\] has no memory"):
        ops.multi_tensor_scale(tensors, tensors, torch.zeros(()), 2.0)
    assert tensors[0][0] == 0
    assert tensors[2999][0] == 2.0 * 2999


class Mine(torch.Tensor):
    pass


def freed(offset=0):
    tensor = torch.ones(8)[offset:]
    tensor.untyped_storage().resize_(0)
    return tensor


def made_smaller():
    """A view of the last elements of a storage that has lost one of them."""
    whole = torch.ones(8)
    view = whole[4:]
    whole.untyped_storage().resize_(7 * 4)
    return view


NOT_READ = {
    "nothing": [],
    "none": [torch.ones(2), None],
    "no-tensor": [torch.ones(2), 3.0],
    "subclass": [torch.ones(2).as_subclass(Mine)],
    "sparse": [torch.ones(2), torch.ones(2).to_sparse()],
    "meta": [torch.ones(2, device="meta")],
    "two-dtypes": [torch.ones(2), torch.ones(2).half()],
    "complex": [torch.ones(2, dtype=torch.complex64)],
    "bool": [torch.ones(2, dtype=torch.bool)],
    "with-holes": [torch.ones(4, 4)[:, :2]],
    "expanded": [torch.ones(1).expand(5)],
    "negated": [torch.ones(2), torch._neg_view(torch.ones(3))],
    "negated-parameter": [nn.Parameter(torch._neg_view(torch.ones(3)))],
    "imaginary": [torch.ones(1, dtype=torch.complex64).conj().imag],
    "zero": [torch._efficientzerotensor(3)],
    "freed": [torch.ones(2), freed()],
    "freed-under-a-view": [freed(3)],
    "made-smaller": [torch.ones(2), made_smaller()],
    "mkldnn": [torch.ones(2).to_mkldnn()],
}


@pytest.mark.parametrize("tensors", NOT_READ.values(), ids=NOT_READ.keys())
def test_what_cannot_be_read_is_left_to_the_dispatcher(tensors):
    assert handles.read(tensors) is None
    torch.ones(1).sum().item()  # no exception is left behind


@pytest.fixture
def lists_read(monkeypatch):
    """What ``handles.read`` has given to the ops."""
    found, read = [], handles.read
    monkeypatch.setattr(handles, "read", lambda tensors: (found.append(read(tensors)), found[-1])[1])
    return found


def test_ops_read_long_lists(lists_read):
    tensors, out = ([torch.full((4,), value) for _ in range(100)] for value in (1.0, 0.0))
    ops.multi_tensor_scale(tensors, out, torch.zeros(()), 2.0)
    assert len(lists_read) == 2
    assert all(isinstance(known, ReadTensors) for known in lists_read)
    assert all(torch.equal(o, torch.full((4,), 2.0)) for o in out)
    ops.multi_tensor_scale(out, out, torch.zeros(()), 2.0)
    assert len(lists_read) == 3
    ops.multi_tensor_scale(tensors[:2], out[:2], torch.zeros(()), 2.0)
    assert len(lists_read) == 3


@pytest.mark.parametrize(
    ("last", "why"),
    [(made_smaller(), "has no memory"), (torch.ones(4).half(), r"has dtype torch.float16, src\[0\]")],
    ids=["made-smaller", "two-dtypes"],
)
def test_an_op_says_what_is_wrong_with_a_long_list(lists_read, last, why):
    out = [torch.zeros(4) for _ in range(100)]
    with pytest.raises(RuntimeError, match=rf"src\[99\] {why}"):
        ops.multi_tensor_scale([*(torch.ones(4) for _ in range(99)), last], out, torch.zeros(()), 2.0)
    assert lists_read == [None]
    assert not any(map(torch.any, out))


def test_wrapped_tensors_are_not_read():
    seen = []
    torch.func.grad(lambda t: (seen.append(handles.read([t])), t.sum())[1])(torch.ones(3))
    torch.func.vmap(lambda t: (seen.append(handles.read([t])), t)[1])(torch.ones(3, 2))
    assert seen == [None, None]


def test_reading_keeps_tensors_for_as_long_as_it_is_kept_itself():
    tensors = [torch.ones(3)]
    reference, known = weakref.ref(tensors[0]), handles.read(tensors)
    del tensors
    gc.collect()
    assert reference() is not None
    number = known.number
    del known
    assert reference() is None
    with pytest.raises(RuntimeError, match="there is no held list"):
        torch.ops.ampctx.multi_tensor_l2norm.held(number, torch.zeros(()), False)


def test_gradients_are_read_with_what_has_none():
    params = [nn.Parameter(torch.ones(3)) for _ in range(3)]
    params[0].grad, params[2].grad = torch.full((3,), 2.0), torch.full((3,), 3.0)
    grads, known = handles.read_grads(params)
    assert grads[0] is params[0].grad
    assert grads[1] is None
    assert grads[2] is params[2].grad
    assert isinstance(known, ReadTensors)
    foreach.scale(known, known, FoundInf(), 2.0)
    assert [p.grad.tolist()[0] for p in (params[0], params[2])] == [4.0, 6.0]
    params[2].grad = params[2].grad.to_sparse()
    grads, known = handles.read_grads(params)
    assert known is None
    assert grads[2] is params[2].grad
    assert handles.read_grads([nn.Parameter(torch.ones(3))]) == ([None], None)


def test_an_error_of_an_attribute_is_raised():
    class Strange(nn.Parameter):
        @property
        def grad(self):
            raise LookupError("not now")

    with pytest.raises(LookupError, match="not now"):
        handles.read_grads([nn.Parameter(torch.ones(3)), Strange(torch.ones(3))])


# --- lists that are none, or change ----------------------------------------------------------------------------------


class Sequel(list):
    """A list whose items are those that it names."""

    def __iter__(self):
        return iter([*super().__iter__(), self.last])


def with_grads(count=3):
    params = [nn.Parameter(torch.ones(3)) for _ in range(count)]
    for i, p in enumerate(params):
        p.grad = torch.full((3,), float(i + 1))
    return params


@pytest.mark.parametrize("kind", [tuple, Sequel, iter])
def test_anything_with_tensors_in_it_is_read_as_a_list_is(kind):
    params = with_grads()

    def listed(tensors):
        made = kind(tensors)
        if kind is Sequel:
            del made[-1]
            made.last = tensors[-1]
        return made

    grads = [p.grad for p in params]
    all_of = handles.read(listed(grads)), handles.read_grads(listed(params))[1], handles.read_along(listed(params))
    for known in (*all_of, handles.read_along(listed(params), listed(grads)), handles.HeldTensors(listed(grads))):
        assert known is not None
        assert all(map(operator.is_, known, grads))
        assert len(known) == len(grads)
        norm, _ = ops.multi_tensor_l2norm(known, torch.zeros(()))
        assert norm == foreach.l2norm(grads, FoundInf())


@pytest.mark.parametrize("wrong", [None, 3, torch.ones(3)], ids=["None", "int", "Tensor"])
@pytest.mark.parametrize(
    "entry", [handles.read, handles.read_grads, handles.read_along, handles.HeldTensors], ids=lambda f: f.__name__
)
def test_what_is_no_list_is_refused_by_name(entry, wrong):
    with pytest.raises(AmpTypeError, match=rf"{entry.__name__}: \w+ is a {type(wrong).__name__}, expected a list"):
        entry(wrong)


def test_what_is_no_tensor_is_refused_by_name():
    for entry in (handles.read_grads, handles.read_along):
        with pytest.raises(AmpTypeError, match=rf"{entry.__name__}: params\[3\] is a float, expected a tensor"):
            entry([*with_grads(), 3.0])
    with pytest.raises(AmpTypeError, match=r"HeldTensors: tensors\[1\] is a float, expected a tensor"):
        handles.HeldTensors([torch.ones(3), 3.0])


@pytest.mark.parametrize("wrong", [None, (), 3, torch.ones(3)], ids=["None", "tuple", "int", "Tensor"])
def test_the_library_itself_refuses_what_is_no_list(wrong):
    """It would take the size of a tuple for a very large one."""
    extension, number = handles.extension, handles.extension.new_list()[0]
    with pytest.raises(TypeError, match="read: tensors is no list"):
        extension.read_tensors(wrong, number)
    with pytest.raises(TypeError, match="read_grads: params or grads is no list"):
        extension.read_grads(wrong, [], False, number)
    with pytest.raises(TypeError, match="read_grads: params or grads is no list"):
        extension.read_grads(with_grads(), wrong, True, number)


@pytest.mark.full(but=3)
@pytest.mark.parametrize("change", ["clear", "pop", "append"])
@pytest.mark.parametrize("entry", [handles.read_grads, handles.read_along], ids=lambda f: f.__name__)
def test_a_list_that_changes_while_it_is_read_is_refused(entry, change):
    class Changes(nn.Parameter):
        @property
        def grad(self):
            getattr(params, change)(*([nn.Parameter(torch.ones(3))] if change == "append" else []))
            gc.collect()
            return torch.ones(3)

    handles.extension.use_types([Changes])
    changing = Changes(torch.ones(3))
    params = [*with_grads(2), changing, *with_grads(2)]
    del changing
    with pytest.raises(TypeError, match="read_grads: a list changed its length while it was read"):
        entry(params)


def test_a_parameter_that_is_let_go_while_it_is_read_does_no_harm():
    """Only its place in the list has kept it."""

    class Leaves(nn.Parameter):
        @property
        def grad(self):
            params[:] = with_grads(len(params))
            return torch.ones(3)

    handles.extension.use_types([Leaves])
    params = [Leaves(torch.ones(3)) for _ in range(50)]
    known = handles.read_along(params)
    assert known is not None
    assert [g.tolist()[0] for g in known] == [1.0, *map(float, range(2, 51))]


def test_what_was_read_outlives_the_list_of_the_caller():
    tensors, params = [torch.full((5000,), 2.0) for _ in range(4)], with_grads(3)
    known, (grads, of_grads) = handles.read(tensors), handles.read_grads(params)
    along = handles.read_along(params, tensors[:0])
    norms = [foreach.l2norm(list(k), FoundInf()) for k in (known, of_grads, along)]
    tensors.clear(), grads.clear()
    for p in params:
        p.grad = None
    gc.collect()
    others = [torch.full((5000,), 7.0) for _ in range(8)]
    assert [ops.multi_tensor_l2norm(k, torch.zeros(()))[0] for k in (known, of_grads, along)] == norms
    assert len(others) == 8


def cases():
    def param(make, grad):
        p = make(torch.ones(2, 3, 4, 4))
        p.grad = grad(torch.ones(2, 3, 4, 4))
        return p

    def channels_last(t):
        return t.to(memory_format=torch.channels_last)

    def no(t):
        return None

    same = [param(nn.Parameter, torch.clone) for _ in range(2)]
    yield pytest.param(same, True, id="all-contiguous")
    both = param(nn.Parameter, torch.clone)
    both.data = channels_last(both.data)
    both.grad = channels_last(both.grad)
    yield pytest.param([both], True, id="both-channels-last")
    yield pytest.param([*same, param(nn.Parameter, channels_last)], False, id="gradient-channels-last")
    yield pytest.param([*same, param(nn.Parameter, no)], False, id="one-without")
    halves = nn.Parameter(torch.ones(2).half())
    halves.grad = torch.ones(2).half()
    yield pytest.param([*same, halves], False, id="two-dtypes")


@pytest.mark.parametrize(("params", "can_be_read"), list(cases()))
def test_gradients_are_read_along_with_parameters_of_the_same_layout(params, can_be_read):
    known = handles.read_along(params)
    assert (known is not None) == can_be_read
    if known is not None:
        assert all(grad is p.grad for grad, p in zip(known.tensors, params, strict=True))
        assert known.are_contiguous == all(p.is_contiguous() for p in params)
        others = [torch.empty_like(p.grad).fill_(7) for p in params]
        along = handles.read_along(params, others)
        assert all(map(operator.is_, along.tensors, others))
        norm, _ = ops.multi_tensor_l2norm(along, torch.zeros(()))
        assert norm == foreach.l2norm(others, FoundInf())
        assert handles.read_along(params, [torch.ones(5) for _ in params]) is None


def test_devices_without_kernels_are_left_to_the_fallback(monkeypatch):
    """As with a build without nvcc on a machine with a GPU."""
    monkeypatch.setattr(handles, "extension", dataclasses.replace(handles.extension, backends=()))
    param = nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    assert handles.read([torch.ones(3)]) is None
    assert handles.read_along([param]) is None
    grads, known = handles.read_grads([param])
    assert grads[0] is param.grad
    assert known is None


def test_nothing_is_read_where_a_dispatch_mode_looks_on():
    class Ops(TorchDispatchMode):
        seen = ()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen = (*self.seen, func)
            return func(*args, **(kwargs or {}))

    with Ops() as mode:
        foreach.l2norm([torch.ones(3)], FoundInf())
    assert torch.ops.ampctx.multi_tensor_unscale_l2norm.default in mode.seen
    assert torch.ops.ampctx.multi_tensor_unscale_l2norm.held not in mode.seen


def test_nothing_is_read_while_a_compiler_looks():
    def f(x):
        return x if handles.read([x]) is None else x + 1

    assert torch.compile(f, backend="eager", fullgraph=True)(torch.ones(2)).tolist() == [1.0, 1.0]
