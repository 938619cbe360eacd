"""Lists that the library keeps: calls with them are those with the tensors themselves."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from backends import COMPILED, EMULATED, _factor, with_threads
from optimizer_calls import DEFAULTS, NOVOGRAD, STEP_OPS, argument_names, make_call

from ampctx import optimizer_ops
from ampctx._errors import AmpValueError
from ampctx.kernels import handles

SIZES = [3, 0, (2, 5), 5000]


def held(call, backend, found_inf=None, **lists):
    """``call`` with every list held; ``lists`` gives numbers in their place."""
    hold = backend.ops.hold_tensors.default
    numbers = {name: hold(tensors) if tensors else 0 for name, tensors in call.lists.items()}
    flag = backend.flag() if found_inf is None else found_inf
    given = {
        **{name: 0 if value == [] else value for name, value in DEFAULTS.items()},
        **call.options,
        **numbers,
        **lists,
        "found_inf": flag,
    }
    given |= {"inv_scale": _factor(0.5), "lr": _factor(0.01)}
    getattr(backend.ops, call.op).held(*(given[name] for name in argument_names(call.op)))


@pytest.mark.parametrize("backend", [COMPILED, EMULATED], indirect=True, ids=lambda b: b.name)
@pytest.mark.parametrize("optimizer", STEP_OPS, ids=lambda o: o.name)
def test_held_lists_give_the_same(backend, optimizer):
    call = make_call(backend, optimizer, SIZES, param=torch.bfloat16, write_back="split")
    expected, call = call.clone().run(backend), call.clone()  # aligned alike: sums go by that
    held(call, backend)
    call.assert_same(expected)


@pytest.mark.parametrize("number", [-1, 2**62])
@pytest.mark.parametrize("optimizer", STEP_OPS, ids=lambda o: o.name)
def test_a_number_of_no_list_is_refused_and_nothing_changes(optimizer, number):
    call = make_call(COMPILED, optimizer, SIZES)
    before = call.clone()
    with pytest.raises(RuntimeError, match=f"{call.op}: there is no held list of number {number}"):
        held(call, COMPILED, params=number)
    call.assert_same(before)


def test_held_tensors_are_looked_at_in_each_call():
    call = make_call(COMPILED, STEP_OPS[0], SIZES)
    numbers = handles.HeldTensors(call["params"])
    call["params"][0].data = torch.full_like(call["params"][0], 7)
    expected = call.clone().run(COMPILED)
    held(call, COMPILED, params=numbers.number)
    call.assert_same(expected)
    call["params"][2].data = torch.zeros(4)
    before = call.clone()
    with pytest.raises(RuntimeError, match=r"multi_tensor_adam: params\[2\] has 4 elements, grads\[2\] has 10"):
        held(call, COMPILED, params=numbers.number)
    call["params"][3].untyped_storage().resize_(0)
    call["params"][2].data = torch.zeros(2, 5)
    with pytest.raises(RuntimeError, match=r"multi_tensor_adam: params\[3\] has no memory"):
        held(call, COMPILED, params=numbers.number)
    assert torch.equal(call["params"][0], before["params"][0])


@pytest.mark.parametrize("empty", [None, 0, 2500])
def test_thousands_of_held_tensors_give_what_few_at_a_time_give(empty):
    sizes = [(1 + i % 3, 1 + i % 5) for i in range(3000)]
    if empty is not None:
        sizes[empty] = 0
    call = make_call(COMPILED, NOVOGRAD, sizes, write_back="copy")
    for name in call.elementwise:
        call[name][8] = call[name][8].t()  # dense, not contiguous
    parts = [call.clone() for _ in range(2)]
    for part, end in zip(parts, (slice(None, 100), slice(100, None)), strict=True):
        part.lists = {name: tensors[end] for name, tensors in part.lists.items()}
        part.run(COMPILED)
    for given in with_threads(lambda: (whole := call.clone(), held(whole, COMPILED))[0]):
        for name, tensors in given.lists.items():
            assert all(map(torch.equal, tensors, parts[0][name] + parts[1][name])), name


def test_a_list_is_let_go_with_its_object():
    tensor = torch.ones(3)
    lists = handles.HeldTensors([tensor])
    number, reference = lists.number, weakref.ref(tensor)
    del tensor
    gc.collect()
    assert reference() is not None
    del lists
    assert reference() is None
    call = make_call(COMPILED, STEP_OPS[0], [3])
    with pytest.raises(RuntimeError, match="there is no held list"):
        held(call, COMPILED, params=number)


@pytest.mark.parametrize("which", [None, ("params", "extras")], ids=["all", "some"])
def test_typed_calls_take_held_lists_and_tell_autograd(which):
    call = make_call(COMPILED, STEP_OPS[0], SIZES, write_back="copy")
    expected = call.clone().run(COMPILED)
    lists = {
        name: handles.HeldTensors(t) if t and (not which or name in which) else t for name, t in call.lists.items()
    }
    options = {**call.options, "write_back": "copy"}
    optimizer_ops.adam(**lists, found_inf=torch.zeros(()), inv_scale=0.5, lr=0.01, **options)
    call.assert_same(expected)
    assert all(t._version >= 1 for name in ("params", "extras") for t in call[name])


@pytest.mark.parametrize(
    "tensor", [torch.ones(3, dtype=torch.complex64).conj().imag, torch._efficientzerotensor(3)], ids=["negated", "zero"]
)
def test_what_the_dispatcher_copies_is_not_held(tensor):
    with pytest.raises(AmpValueError, match=r"would hand over a copy. Pass its clone\(\)"):
        handles.HeldTensors([torch.ones(3), tensor])
    handles.HeldTensors([torch.ones(3), tensor.clone()])


def test_an_empty_list_cannot_be_held():
    with pytest.raises(AmpValueError, match="HeldTensors: the list is empty"):
        handles.HeldTensors([])
