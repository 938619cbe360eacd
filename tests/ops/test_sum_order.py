"""The order of a sum depends on sizes and types, not on where tensors are in memory: equal values, equal norms."""

import pytest
import torch
from backends import FLOATS, short
from optimizer_calls import LAMB, make_call, on_kernels

pytestmark = on_kernels
SHIFTS = (1, 2, 3, 5, 8)
SIZES = [5000, 33, 2049, 7, 700]


def shifted(t, shift):
    """The same values, ``shift`` elements behind an aligned address."""
    memory = torch.empty(t.numel() + shift, dtype=t.dtype, device=t.device)
    assert memory.data_ptr() % 16 == 0
    memory[shift:] = t
    return memory[shift:]


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
def test_norms_do_not_depend_on_addresses(backend, dtype):
    tensors = [shifted(t, 0) for t in backend.randn(SIZES, dtype)]
    norm, per_tensor = backend.l2norm(tensors, backend.flag(), 0.3)
    for shift in SHIFTS:
        others = [shifted(t, shift) for t in tensors]
        # All of them, and one in the midst of aligned ones.
        for moved in (others, [*tensors[:2], others[2], *tensors[3:]]):
            again, each = backend.l2norm(moved, backend.flag(), 0.3)
            assert torch.equal(again, norm), shift
            assert torch.equal(each, per_tensor), shift


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
def test_layer_wise_steps_do_not_depend_on_addresses(backend, dtype):
    call = make_call(backend, LAMB, SIZES, grad=dtype, param=dtype)
    place(call, dict.fromkeys(call.elementwise, 0))
    results = []
    for shift in (0, *SHIFTS):
        moved = call.clone()
        # Each list at another distance from a boundary: no two shifts give the same set.
        place(moved, {name: shift * (1 + i % 2) for i, name in enumerate(moved.elementwise)})
        results.append(moved.run(backend))
    for moved in results[1:]:
        results[0].assert_same(moved)


def place(call, shifts):
    for name, shift in shifts.items():
        call.lists[name] = [shifted(t, shift) for t in call[name]]
