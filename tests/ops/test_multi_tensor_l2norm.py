"""multi_tensor_l2norm and multi_tensor_unscale_l2norm on every backend, against fp64."""

import math

import pytest
import torch
from backends import FLOATS, short, with_threads


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
