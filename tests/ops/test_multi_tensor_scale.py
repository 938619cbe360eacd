"""multi_tensor_scale and multi_tensor_axpby on every backend: bit for bit what plain torch computes, no contraction to
FMA. test_op_properties.py has lists of any sizes and layouts."""

import pytest
import torch
from backends import (
    ALL_FLOATS,
    CHUNKS,
    FLOATS,
    NON_FINITE,
    combination_id,
    combinations,
    compute_dtype,
    serves_or_refuses,
    short,
)

from ampctx import ops


def scaled(src, dtype, factor):
    compute = compute_dtype(src.dtype, dtype)
    return (src.to(compute) * torch.tensor(factor, dtype=compute)).to(dtype)


def assert_scaled(dst, src, factor):
    for i, row in enumerate(zip(src, dst, strict=True)):
        s, d = (each.cpu() for each in row)  # where a small op takes plain torch least
        assert torch.equal(d, scaled(s, d.dtype, factor)), f"tensor {i}"


@pytest.mark.parametrize("dtypes", combinations(ALL_FLOATS, 2), ids=combination_id)
def test_dtypes(backend, dtypes):
    src = backend.randn([5, 0, 2049, 64], dtypes[0])
    dst = [torch.full_like(s, 7, dtype=dtypes[1]) for s in src]
    if serves_or_refuses(backend, lambda: backend.scale(src, dst, backend.flag(), 0.3), *dtypes):
        assert_scaled(dst, src, 0.3)


@pytest.mark.parametrize("dtypes", combinations(ALL_FLOATS, 3), ids=combination_id)
def test_dtypes_of_axpby(backend, dtypes):
    x, y = (backend.randn([5, 0, 2049, 64], dtype, seed=i) for i, dtype in enumerate(dtypes[:2]))
    out = [torch.empty_like(t, dtype=dtypes[2]) for t in x]
    compute = compute_dtype(*dtypes)
    a, b = (torch.tensor(factor, dtype=compute) for factor in (0.3, -1.7))
    if serves_or_refuses(backend, lambda: backend.axpby(x, y, out, backend.flag(), 0.3, -1.7), *dtypes):
        for each in zip(x, y, out, strict=True):
            s, t, o = (part.cpu() for part in each)
            assert torch.equal(o, (a * s.to(compute) + b * t.to(compute)).to(o.dtype))


@pytest.mark.parametrize("dtypes", combinations(FLOATS, 2), ids=combination_id)
def test_every_alignment(backend, dtypes):
    """Views at every storage offset up to a cache line, the two lists not in step."""
    size, shifts = 83, [(a, (a * 5 + b) % 17) for a in range(17) for b in (0, 3)]
    src = [backend.randn([size + 17], dtypes[0], seed=a)[0][a : a + size] for a, _ in shifts]
    room = [torch.full((size + 17,), 7.0, device=backend.device, dtype=dtypes[1]) for _ in shifts]
    dst = [r[b : b + size] for r, (_, b) in zip(room, shifts, strict=True)]
    backend.scale(src, dst, backend.flag(), 0.3)
    assert_scaled(dst, src, 0.3)
    for r, (_, b) in zip(room, shifts, strict=True):
        assert (r[:b] == 7).all()
        assert (r[b + size :] == 7).all()


FACTORS = {
    "float": lambda d: 0.3,
    "fp64-cpu": lambda d: torch.tensor(0.3, dtype=torch.float64),
    "fp32-cpu": lambda d: torch.tensor(0.3),
    "one-element": lambda d: torch.tensor([0.3]),
    "on-the-device": lambda d: torch.tensor(0.3, device=d),
}


@pytest.mark.parametrize("factor", FACTORS.values(), ids=FACTORS.keys())
def test_factor_forms(backend, factor):
    src = backend.randn([100])
    dst = [torch.empty_like(s) for s in src]
    backend.scale(src, dst, backend.flag(), factor(backend.device))
    assert_scaled(dst, src, 0.3)


@pytest.mark.parametrize("value", NON_FINITE.values(), ids=NON_FINITE.keys())
@pytest.mark.parametrize("dtype", FLOATS, ids=short)
def test_one_non_finite_element_raises_the_flag(backend, dtype, value):
    """At the first and last place of a list, and around the edges where chunks meet."""
    sizes = [2 * CHUNKS[-1] + 3, 5]
    edges = sorted({at + off for chunk in CHUNKS for at in (0, chunk, 2 * chunk) for off in (-1, 0, 1)})
    places = [(0, at) for at in edges if 0 <= at < sizes[0]] + [(0, sizes[0] - 1), (1, 0), (1, 4)]
    for tensor, at in places:
        src = backend.randn(sizes, dtype)
        src[tensor][at] = value
        dst = [torch.empty_like(s) for s in src]
        found_inf = backend.flag()
        backend.scale(src, dst, found_inf, 2.0)
        assert found_inf == 1, f"src[{tensor}][{at}]"
        want = scaled(src[tensor], dtype, 2.0)
        assert torch.equal(torch.nan_to_num(dst[tensor], 1.5), torch.nan_to_num(want, 1.5)), f"src[{tensor}][{at}]"
        assert dst[tensor].isnan().sum() == want.isnan().sum()


@pytest.mark.parametrize("flag_dtype", [torch.float32, torch.int32], ids=str)
@pytest.mark.parametrize("before", [0, 1, 2])
def test_the_flag_is_raised_and_never_cleared(backend, flag_dtype, before):
    clean = backend.randn([10])
    found_inf = backend.flag(before, flag_dtype)
    backend.scale(clean, clean, found_inf, 2.0)
    assert found_inf == before
    bad = [torch.full((10,), float("nan"), device=backend.device)]
    for shape in ((), (1, 1)):
        found_inf = backend.flag(before, flag_dtype).view(shape)
        backend.scale(bad, bad, found_inf, 2.0)
        assert found_inf == 1
        assert (found_inf.dtype, found_inf.shape) == (flag_dtype, shape)


def test_overflow_of_the_result_is_no_overflow_of_the_input(backend):
    src = [torch.full((9,), 60000.0, device=backend.device)]
    dst = [torch.empty(9, dtype=torch.float16, device=backend.device)]
    found_inf = backend.flag()
    backend.scale(src, dst, found_inf, 2.0)
    assert dst[0].isinf().all()
    assert found_inf == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=short)
def test_all_16_bit_values(backend, dtype):
    """To fp32 and back: subnormals, signed zeros, inf; NaN stays NaN."""
    values = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype).to(backend.device)
    wide, back = torch.empty(1 << 16, device=backend.device), torch.empty_like(values)
    backend.scale([values], [wide], backend.flag(), 1.0)
    backend.scale([wide], [back], backend.flag(), 1.0)
    number = ~values.isnan()
    assert torch.equal(wide.view(torch.int32)[number], values.float().view(torch.int32)[number])
    assert torch.equal(back.view(torch.int16)[number], values.view(torch.int16)[number])
    assert wide[~number].isnan().all()
    assert back[~number].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=short)
def test_rounding_to_16_bits(backend, dtype):
    """Ties, and the numbers just beside them, between all neighbours."""
    values = torch.arange(0, 1 << 15).to(torch.int16).view(dtype)
    low = values[values.isfinite()].double()
    middle = ((low[:-1] + low[1:]) / 2).float()
    exact = middle[middle.double() * 2 == low[:-1] + low[1:]]
    src = torch.cat([exact, exact.nextafter(torch.tensor(0.0)), exact.nextafter(torch.tensor(float("inf")))])
    src = torch.cat([src, -src, torch.tensor([65519.99, 65520.0, 3.39e38, 1e-45, 0.0, -0.0])]).to(backend.device)
    dst = torch.empty_like(src, dtype=dtype)
    backend.scale([src], [dst], backend.flag(), 1.0)
    assert exact.numel() > 30_000
    assert torch.equal(dst.view(torch.int16), src.to(dtype).view(torch.int16))


@pytest.mark.full(but=4)
@pytest.mark.parametrize("dtypes", combinations(FLOATS, 2), ids=combination_id)
def test_outputs_larger_than_the_caches(dtypes):
    """They are written past these where types differ: whole memory lines, and tensors that begin within a line."""
    sizes = [17 << 20, 12345, 2048 * 3 + 33]
    big = torch.randn(sizes[0]).to(dtypes[0])
    big[-1] = torch.inf
    src = [big, *(big[i : i + n].clone() for i, n in enumerate(sizes[1:]))]
    dst = [torch.empty(n + 1, dtype=dtypes[1])[i % 2 : n + i % 2] for i, n in enumerate(sizes)]
    found_inf = torch.zeros(())
    ops.multi_tensor_scale(src, dst, found_inf, 0.3)
    assert_scaled(dst, src, 0.3)
    assert found_inf == 1


@pytest.mark.large
def test_more_than_2_to_the_31_elements(backend):
    """4 GB: element 2^31 is reached, and nothing before it is missed."""
    n = (1 << 31) + 1
    tensor = torch.ones(n, dtype=torch.float16, device=backend.device)
    found_inf = backend.flag()
    backend.scale([tensor], [tensor], found_inf, 2.0)
    assert tensor.min() == 2 == tensor.max()
    assert found_inf == 0
    tensor[-1] = float("inf")
    backend.scale([tensor], [tensor], found_inf, 2.0)
    assert found_inf == 1
