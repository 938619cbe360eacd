"""multi_tensor_l2norm and multi_tensor_unscale_l2norm on every backend, against fp64."""

import math

import pytest
import torch
from backends import ALL_FLOATS, CHUNKS, FLOATS, FULL_BLOCKS, NON_FINITE, SIZES, serves_or_refuses, short, with_threads


def assert_norms(norm, per_tensor, tensors, inv_scale=1.0):
    dtype = torch.float64 if tensors and tensors[0].dtype == torch.float64 else torch.float32
    assert norm.shape == ()
    assert per_tensor.shape == (len(tensors),)
    assert norm.dtype == per_tensor.dtype == dtype
    exact = [torch.linalg.vector_norm(t.cpu().double() * inv_scale).item() for t in tensors]
    sizes = [t.numel() for t in tensors]
    rows = [*zip(per_tensor.tolist(), exact, sizes, strict=True), (norm.item(), math.hypot(*exact), sum(sizes))]
    for got, want, n in rows:
        assert abs(got - want) <= 4 * math.sqrt(n) * torch.finfo(dtype).eps * want


@pytest.mark.full(but=25)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_sizes(backend, sizes):
    if backend is FULL_BLOCKS:
        sizes = sizes[:1000]
    tensors = backend.randn(sizes)
    found_inf = backend.flag()
    assert_norms(*backend.l2norm(tensors, found_inf), tensors)
    assert found_inf == 0


@pytest.mark.parametrize("dtype", ALL_FLOATS, ids=short)
@pytest.mark.parametrize("form", ["plain", "float", "tensor", "on-the-device"])
def test_dtypes_and_inv_scale(backend, dtype, form):
    forms = {"plain": None, "float": 0.3, "tensor": torch.tensor(1 / 65536)}
    inv_scale = (forms | {"on-the-device": torch.tensor([0.3], device=backend.device)})[form]
    tensors = backend.randn([5, 0, 2049, 64], dtype)
    kept = [t.clone() for t in tensors]
    found = []
    if serves_or_refuses(backend, lambda: found.append(backend.l2norm(tensors, backend.flag(), inv_scale)), dtype):
        assert_norms(*found[0], tensors, 1.0 if inv_scale is None else float(inv_scale))
        assert all(map(torch.equal, tensors, kept))


@pytest.mark.parametrize("inv_scale", [None, 0.5], ids=["plain", "unscale"])
@pytest.mark.parametrize("sizes", [[], [3, 0, 5000]], ids=["no-tensors", "some"])
def test_without_per_tensor(backend, sizes, inv_scale):
    tensors = backend.randn(sizes)
    norm, per_tensor = backend.l2norm(tensors, backend.flag(), inv_scale, per_tensor=False)
    assert per_tensor.shape == (0,)
    assert torch.equal(norm, backend.l2norm(tensors, backend.flag(), inv_scale, per_tensor=True)[0])


def test_results_are_on_the_device_of_the_lists(backend):
    norm, per_tensor = backend.l2norm([], backend.flag())
    assert norm.device == per_tensor.device == backend.flag().device
    assert norm == 0


def test_every_alignment(backend):
    for dtype in FLOATS:
        tensors = [backend.randn([100], dtype, seed=i)[0][i:] for i in range(17)]
        assert_norms(*backend.l2norm(tensors, backend.flag()), tensors)


@pytest.mark.parametrize("value", NON_FINITE.values(), ids=NON_FINITE.keys())
@pytest.mark.parametrize("dtype", FLOATS, ids=short)
def test_one_non_finite_element_raises_the_flag(backend, dtype, value):
    sizes = [2 * CHUNKS[-1] + 3, 5]
    for tensor, at in [(0, 0), (0, 511), (0, 512), (0, 2047), (0, 2048), (0, sizes[0] - 1), (1, 0), (1, 4)]:
        tensors = backend.randn(sizes, dtype)
        tensors[tensor][at] = value
        found_inf = backend.flag(dtype=torch.int32)
        norm, per_tensor = backend.l2norm(tensors, found_inf)
        assert found_inf == 1, f"tensors[{tensor}][{at}]"
        assert not norm.isfinite()
        assert not per_tensor[tensor].isfinite()
        assert per_tensor[1 - tensor].isfinite()


def test_an_infinite_sum_of_squares_is_no_infinite_gradient(backend):
    tensors = [torch.full((3000,), 3e38, device=backend.device), torch.ones(4, device=backend.device)]
    found_inf = backend.flag()
    norm, per_tensor = backend.l2norm(tensors, found_inf)
    assert found_inf == 0
    assert norm > 3e38
    assert per_tensor[0] > 3e38
    assert per_tensor[1] == 2
    unscaled, _ = backend.l2norm(tensors, found_inf, 2.0**-100)
    assert unscaled.isfinite()
    assert found_inf == 0


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
def test_two_runs_agree_to_the_last_bit(backend, dtype):
    tensors = backend.randn([100_003, 1, 0, 70_001, *range(600)], dtype)
    first, *others = with_threads(lambda: backend.l2norm(tensors, backend.flag()), (1, 2, 2))
    assert all(all(map(torch.equal, norms, first)) for norms in others)


def test_many_tensors_in_the_share_of_a_block(backend):
    """Sum after sum through the same shared memory."""
    tensors = [t * (i % 7 + 1) for i, t in enumerate(backend.randn([600] * 100))]
    assert_norms(*backend.l2norm(tensors, backend.flag()), tensors)


def leave_nan_in_freed_memory(backend, tensors):
    """So that what the op allocates and does not write shows: its workspace, the norm, the norms of N tensors."""
    for floats in (tensors + 4096, 2 * tensors, tensors, 1):
        used = [torch.full((floats,), float("nan"), device=backend.device) for _ in range(20)]
        del used


def test_tensors_that_fill_whole_shares(backend):
    """The end of a tensor and the end of a block's share fall together, again and again."""
    tensors = [torch.full((512,), float(i + 1), device=backend.device) for i in range(9)]
    leave_nan_in_freed_memory(backend, len(tensors))
    norm, per_tensor = backend.l2norm(tensors, backend.flag())
    root = math.sqrt(512)
    torch.testing.assert_close(per_tensor.cpu(), torch.arange(1.0, 10.0) * root)
    assert norm.item() == pytest.approx(math.sqrt(285) * root)


@pytest.mark.parametrize("sizes", [[], [0, 0], [0, 3, 0]], ids=["no-tensors", "only-empties", "some-empties"])
def test_norms_of_empty_tensors_are_written(backend, sizes):
    tensors = backend.randn(sizes)
    leave_nan_in_freed_memory(backend, len(tensors))
    assert_norms(*backend.l2norm(tensors, backend.flag()), tensors)
