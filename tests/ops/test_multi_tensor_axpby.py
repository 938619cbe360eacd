"""multi_tensor_axpby on every backend: bit for bit what plain torch computes, no contraction to FMA."""

import pytest
import torch
from backends import ALL_FLOATS, NON_FINITE, SIZES, combination_id, combinations, compute_dtype, serves_or_refuses

A, B = 0.3, -1.7


def combined(x, y, dtype):
    compute = compute_dtype(x.dtype, y.dtype, dtype)
    a, b = (torch.tensor(factor, dtype=compute) for factor in (A, B))
    return (a * x.to(compute) + b * y.to(compute)).to(dtype)


def assert_combined(out, x, y):
    for i, row in enumerate(zip(x, y, out, strict=True)):
        s, t, o = (each.cpu() for each in row)  # where a small op takes plain torch least
        assert torch.equal(o, combined(s, t, o.dtype)), f"tensor {i}"


@pytest.mark.full(but=20)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_sizes(backend, sizes):
    x, y = backend.randn(sizes, torch.float16), backend.randn(sizes, torch.float32, seed=1)
    out = [torch.empty_like(t) for t in y]
    found_inf = backend.flag()
    backend.axpby(x, y, out, found_inf, A, B)
    assert_combined(out, x, y)
    assert found_inf == 0


@pytest.mark.parametrize("dtypes", combinations(ALL_FLOATS, 3), ids=combination_id)
def test_dtypes(backend, dtypes):
    sizes = [5, 0, 2049, 64]
    x, y = backend.randn(sizes, dtypes[0]), backend.randn(sizes, dtypes[1], seed=1)
    out = [torch.empty_like(t, dtype=dtypes[2]) for t in x]
    if serves_or_refuses(backend, lambda: backend.axpby(x, y, out, backend.flag(), A, B), *dtypes):
        assert_combined(out, x, y)


@pytest.mark.parametrize("target", ["x", "y"])
def test_in_place(backend, target):
    x, y = backend.randn(SIZES["many-chunks"]), backend.randn(SIZES["many-chunks"], seed=1)
    kept_x, kept_y = [t.clone() for t in x], [t.clone() for t in y]
    out = {"x": x, "y": y}[target]
    backend.axpby(x, y, out, backend.flag(), A, B)
    assert_combined(out, kept_x, kept_y)


@pytest.mark.parametrize("arg_to_check", [-1, 0, 1])
@pytest.mark.parametrize("bad", ["x", "y", "both", "neither"])
@pytest.mark.parametrize("value", NON_FINITE.values(), ids=NON_FINITE.keys())
def test_arg_to_check(backend, arg_to_check, bad, value):
    x, y = backend.randn([700, 2049]), backend.randn([700, 2049], seed=1)
    if bad in ("x", "both"):
        x[1][2048] = value
    if bad in ("y", "both"):
        y[0][0] = value
    found_inf = backend.flag(dtype=torch.int32)
    backend.axpby(x, y, [torch.empty_like(t) for t in x], found_inf, A, B, arg_to_check)
    watched = {-1: ("x", "y", "both"), 0: ("x", "both"), 1: ("y", "both")}[arg_to_check]
    assert found_inf == int(bad in watched)


def test_views_at_different_offsets(backend):
    x = [backend.randn([600])[0][1:]]
    y = [backend.randn([602], torch.float16, seed=1)[0][3:]]
    out = [torch.empty(607, dtype=torch.bfloat16, device=backend.device)[8:]]
    backend.axpby(x, y, out, backend.flag(), A, B)
    assert_combined(out, x, y)


def test_factors_on_the_device(backend):
    x, y = backend.randn([100]), backend.randn([100], seed=1)
    a, b = torch.tensor(A, device=backend.device), torch.tensor([B], device=backend.device)
    out = [torch.empty_like(t) for t in x]
    backend.axpby(x, y, out, backend.flag(), a, b)
    assert_combined(out, x, y)
