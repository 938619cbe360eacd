"""The walk of the CUDA kernels over states that are codes, or rounded at random: where blocks of 64 elements are cut,
what a warp has beyond the end of a tensor, tables and launches."""

import ctypes

import pytest
import torch
from backends import EMULATED
from optimizer_calls import ADAM, CODED, LAMB, make_call

from ampctx.kernels.codes import BLOCK

pytestmark = pytest.mark.usefixtures("emulation", "reference")
# Of Adam: eight lists, 72 bytes for each tensor.
IN_SMALL_TABLE, IN_LARGEST_TABLE = 52, 450


def launches(library):
    library.ampctx_test_launches.restype = ctypes.c_int64
    return library.ampctx_test_launches()


# Elements in front of a tensor move the cuts between shares, which are multiples of 512 elements of all tensors.
@pytest.mark.parametrize("before", [0, 1, 8, 63, 64, 65, 448, 449, 511])
@pytest.mark.parametrize("state", ["8bit", torch.bfloat16], ids=str)
def test_shares_are_cut_between_blocks(before, state):
    sizes = [*([before] if before else []), 512, 5000, 1, 512 * 3 - before, 33]
    call = make_call(EMULATED, ADAM, sizes, state=state, stochastic_state=True, grad=torch.bfloat16)
    expected = call.expected(times=2)
    call.run(EMULATED, times=2).assert_same(expected)


@pytest.mark.parametrize("name", ["grads", "params", "extras", "exp_avgs", "exp_avg_sqs", "none"])
def test_each_list_may_lie_anywhere(name):
    what = {"param": torch.bfloat16, "grad": torch.float16, "write_back": "split"}
    call = make_call(EMULATED, ADAM, [64, 200, 1000], state="8bit", stochastic_state=True, **what)
    for of_list, tensors in call.lists.items():
        if of_list in ("steps", *(state.scales for state in CODED.values())):
            continue
        moved = [torch.empty(16 + t.numel(), dtype=t.dtype)[int(of_list == name) :][: t.numel()] for t in tensors]
        call.lists[of_list] = [to.copy_(t) for to, t in zip(moved, tensors, strict=True)]
    expected = call.expected()
    call.run(EMULATED).assert_same(expected)


@pytest.mark.parametrize("optimizer", [ADAM, LAMB], ids=lambda o: o.name)
def test_what_is_beyond_the_end_of_a_tensor_is_in_no_block(optimizer):
    """Without gradients and eps, u is 0 / 0 there; and the last block is as if it were alone."""
    call = make_call(EMULATED, optimizer, [3, BLOCK + 3], state="8bit", eps=0.0)
    expected = call.expected(inv_scale=1.0)
    call.run(EMULATED, inv_scale=1.0).assert_agrees(expected)
    assert all(torch.isfinite(t.float()).all() for _, t in call.tensors())


@pytest.mark.parametrize("tensors", [IN_SMALL_TABLE, IN_SMALL_TABLE + 1, IN_LARGEST_TABLE, IN_LARGEST_TABLE + 1])
def test_tables(emulation, tensors):
    """Of every size give the same."""
    sizes = [1 + i % 70 for i in range(tensors)]
    numbers = torch.arange(tensors).flip(0)
    call = make_call(EMULATED, ADAM, sizes, state="mixed", stochastic_state=True, numbers=numbers)
    expected = call.expected()
    before = launches(emulation)
    call.run(EMULATED).assert_same(expected)
    assert launches(emulation) - before == (2 if tensors > IN_LARGEST_TABLE else 1)
