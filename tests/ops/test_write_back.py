"""How updated weights go back into 16 bits: what each write back promises, apart from the reference's arithmetic.

Plain SGD takes p to p - lr * g; fp32 gradients make of that any weight that is wanted.
"""

import ctypes
import itertools
import math

import pytest
import torch
from backends import NON_FINITE, short
from optimizer_calls import LOW, SGD, bits, make_call

from ampctx.kernels.reference_steps import random_bits

on_low = pytest.mark.parametrize("dtype", LOW, ids=short)


def sgd(backend, params, deltas, write_back, *, extras=(), step=0, seed=0):
    """Adds fp32 ``deltas`` to the weights that params and extras stand for, in place, at the given step count."""
    call = make_call(backend, SGD, [p.shape for p in params], counts=[step], weight_decay=0.0, seed=seed)
    call.lists |= {"grads": list(deltas), "params": list(params), "extras": list(extras)}
    call.options["write_back"] = {"nearest": 0, "split": 2, "kahan": 3, "stochastic": 4}[write_back]
    call.options["maximize"] = True
    call.run(backend, inv_scale=1.0, lr=1.0)


def on_device(backend, values, dtype=torch.float32):
    return torch.tensor(values, dtype=torch.float64).to(backend.device, dtype)


# --- split ------------------------------------------------------------------------------------------------------------


def test_split_keeps_special_weights(backend):
    """Zeros of both signs, subnormals, ties, the largest numbers, inf."""
    patterns = [0, 1, 0x7FFF, 0x8000, 0x8001, 0x3F808000, 0x3F807FFF, 0x7F7FFFFF, 0x7F7F8000, 0x7F800000]
    patterns = torch.tensor(patterns + [p | 1 << 31 for p in patterns])
    low = patterns.to(torch.int16)
    high = ((patterns.to(torch.int32) - low.int()) >> 16).to(torch.int16).view(torch.bfloat16)
    p, rest = high.to(backend.device), low.to(backend.device)
    sgd(backend, [p], [-torch.zeros(len(patterns), device=backend.device)], "split", extras=[rest])  # x - 0 is x
    joined = (bits(p).int() << 16) + rest.int()
    assert torch.equal(joined.cpu(), patterns.to(torch.int32))


# The GPU's canonical nan, and others whose low bits would carry into the sign.
NANS = [0x7FFFFFFF, 0x7FFF8000, 0x7FC00000, 0x7F808001, 0xFFFFFFFF, 0xFFFF8000, 0xFFC0FFFF]


@pytest.mark.parametrize("pattern", NANS, ids=hex)
def test_split_keeps_nan(backend, pattern):
    p, rest = torch.ones(37, dtype=torch.bfloat16, device=backend.device), torch.full((37,), 5, dtype=torch.int16)
    rest = rest.to(backend.device)
    nan = torch.full((37,), pattern - (pattern >> 31 << 32), dtype=torch.int32, device=backend.device)
    sgd(backend, [p], [nan.view(torch.float32)], "split", extras=[rest])
    assert p.isnan().all()
    assert not rest.any()


# --- kahan ------------------------------------------------------------------------------------------------------------


@on_low
def test_small_updates_add_up_with_kahan(backend, dtype):
    """Hundreds of updates, each too small to move a 16-bit weight by itself."""
    n, steps, update = 33, 300, 1e-4
    p, rest, alone = (torch.full((n,), value, dtype=dtype, device=backend.device) for value in (1.0, 0.0, 1.0))
    delta = torch.full((n,), update, device=backend.device)
    for step in range(steps):
        sgd(backend, [p], [delta], "kahan", extras=[rest], step=step)
        if step < 10:
            sgd(backend, [alone], [delta], "nearest", step=step)
    assert (alone == 1.0).all()
    exact = 1.0 + steps * update
    spacing = torch.finfo(dtype).eps
    assert (p.double() - exact).abs().max() <= spacing
    # The compensations have 8 or 11 bits themselves: each step may lose a bit of the last of them.
    assert (p.double() + rest.double() - exact).abs().max() <= steps * spacing * spacing / 2


@on_low
def test_kahan_has_nothing_left_of_a_weight_that_is_not_finite(backend, dtype):
    """Beyond the range the weight is inf: a compensation of inf would make nan of it at the next step."""
    p = torch.full((37,), torch.finfo(dtype).max, dtype=dtype, device=backend.device)
    rest = torch.zeros_like(p)
    delta = torch.full((37,), torch.finfo(dtype).max * 2.0**-7, device=backend.device)
    sgd(backend, [p], [delta], "kahan", extras=[rest])
    assert (p == float("inf")).all()
    assert not rest.any()
    sgd(backend, [p], [torch.zeros_like(delta)], "kahan", extras=[rest], step=1)
    assert (p == float("inf")).all()
    sgd(backend, [p], [torch.full_like(delta, float("nan"))], "kahan", extras=[rest], step=2)
    assert p.isnan().all()
    assert not rest.any()


# --- stochastic -------------------------------------------------------------------------------------------------------

# A 16-bit number and the way to its neighbour.
WEIGHTS = {
    "bf16-one": (torch.bfloat16, 1.0, 2.0**-7),
    "bf16-negative": (torch.bfloat16, -3.0, -(2.0**-6)),
    "bf16-tiny": (torch.bfloat16, 2.0**-120, 2.0**-127),
    "fp16-one": (torch.float16, 1.0, 2.0**-10),
    "fp16-negative": (torch.float16, -3.0, -(2.0**-9)),
    "fp16-smallest-normal": (torch.float16, 2.0**-14, 2.0**-24),
    "fp16-subnormal": (torch.float16, 5 * 2.0**-24, 2.0**-24),
    "fp16-negative-subnormal": (torch.float16, -1023 * 2.0**-24, -(2.0**-24)),
    "fp16-below-the-smallest": (torch.float16, 0.0, 2.0**-24),
}


@pytest.mark.parametrize(("dtype", "low", "spacing"), WEIGHTS.values(), ids=WEIGHTS.keys())
def test_stochastic_rounding_is_unbiased(backend, dtype, low, spacing):
    """Up with the odds of the distance: within 4 sigma of them over a million draws."""
    n, odds = 1_000_000 if not backend.name.startswith("emulated") else 100_000, 0.3125
    p = torch.full((n,), low, dtype=dtype, device=backend.device)
    delta = torch.full((n,), odds * spacing, device=backend.device)
    sgd(backend, [p], [delta], "stochastic", seed=1234)
    up = p.double() == low + spacing
    assert ((p.double() == low) | up).all()
    sigma = math.sqrt(odds * (1 - odds) / n)
    assert abs(up.double().mean().item() - odds) < 4 * sigma


@on_low
def test_random_bits_follow_seed_step_tensor_and_place(backend, dtype):
    def draw(seed=1, step=0, before=()):
        """The same weights twice, behind other tensors."""
        sizes = [*before, 1000, 1000]
        params = [torch.ones(n, dtype=dtype, device=backend.device) for n in sizes]
        deltas = [torch.full((n,), 0.5 * torch.finfo(dtype).eps, device=backend.device) for n in sizes]
        sgd(backend, params, deltas, "stochastic", seed=seed, step=step)
        return params[-2:]

    first, second = draw()
    assert torch.equal(first, draw()[0])
    assert torch.equal(first, draw(before=[0, 0])[0]), "empty tensors do not count"
    others = [second, *(draw(seed=s)[0] for s in (0, 2, -1, 1 << 62, -(1 << 63))), draw(step=1)[0], draw(before=[3])[0]]
    for i, other in enumerate(others):  # as two that know nothing of each other
        assert 400 < (first != other).sum() < 600, i
    assert 400 < (first != first.roll(1)).sum() < 600
    assert torch.equal(second, draw(before=[3])[0]), "the number of the tensor counts, not its size"


def test_random_bits_of_places_beyond_2_to_the_32(emulation):
    """The kernels' functor gives what the reference says, at places that no test has the memory for."""
    places = [0, 1, 2047, 2048, (1 << 32) - 1, 1 << 32, (1 << 32) + 1, (1 << 33) + 12345, (1 << 40) + 7]
    bits_of = emulation.ampctx_test_random_bits
    bits_of.argtypes, bits_of.restype = [ctypes.c_int64] * 4, ctypes.c_int64
    for seed, step, tensor in ((0, 1, 0), (-1, 1, 3), (1 << 62, 123_456, 20_000)):
        want = random_bits(seed, torch.tensor(float(step)), tensor, torch.tensor(places)).tolist()
        assert [bits_of(seed, step, tensor, place) for place in places] == want
        assert len(set(want)) == len(want)


@pytest.mark.parametrize("value", NON_FINITE.values(), ids=NON_FINITE.keys())
@on_low
def test_stochastic_rounding_keeps_inf_and_nan(backend, dtype, value):
    p = on_device(backend, [1.0, -1.0, 0.0] * 20, dtype)
    sgd(backend, [p], [torch.full((60,), value, device=backend.device)], "stochastic")
    assert torch.equal(p.isnan(), torch.full_like(p, math.isnan(value), dtype=torch.bool))
    assert math.isnan(value) or (p == value).all()


@on_low
def test_stochastic_rounding_leaves_what_fits(backend, dtype):
    """Every finite 16-bit number stays itself, the sign of zero included."""
    values = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    values = values[values.isfinite()].to(backend.device)
    p = values.clone()
    sgd(backend, [p], [-torch.zeros(p.shape, device=backend.device)], "stochastic")
    assert torch.equal(bits(p), bits(values))


@on_low
def test_stochastic_rounding_at_the_end_of_the_range(backend, dtype):
    """Between the largest number and the next power of two: the largest number or inf."""
    largest = torch.finfo(dtype).max
    p = torch.full((10_000,), largest, dtype=dtype, device=backend.device)
    spacing = 2.0 ** math.floor(math.log2(largest)) * torch.finfo(dtype).eps
    sgd(backend, [p], [torch.full(p.shape, spacing / 2, device=backend.device)], "stochastic")
    assert ((p == largest) | (p == float("inf"))).all()
    assert 4500 < p.isinf().sum() < 5500


@pytest.mark.parametrize("first", [2**24 - 3, 2**24, 2**25 - 4, 2.0**40])
def test_random_bits_never_repeat_however_long_a_run_is(backend, first):
    """fp32 counts to 2**24; from there on a step goes to the next number. Bits of before are those of the count."""
    count, seen, counts = torch.full((), float(first), device=backend.device), set(), [float(first)]
    for _ in range(8):
        weights = torch.ones(64, device=backend.device, dtype=torch.bfloat16)
        delta = torch.full((64,), 2.0**-8, device=backend.device)  # half way to the next
        call = make_call(backend, SGD, [64], weight_decay=0.0, seed=3)
        call.lists |= {"grads": [delta], "params": [weights], "steps": [count]}
        call.options |= {"write_back": 4, "maximize": True}
        expected = call.clone().expected(inv_scale=1.0, lr=1.0)
        call.run(backend, inv_scale=1.0, lr=1.0)
        call.assert_same(expected)
        drawn = random_bits(3, torch.tensor(count.item()), 0, torch.arange(64))
        assert torch.equal(weights.cpu() > 1, (drawn & 0xFFFF) >= 0x8000)
        seen.add(tuple(weights.tolist()))
        counts.append(count.item())
    assert len(seen) == 8
    steps = [b - a for a, b in itertools.pairwise(counts)]
    assert all(step == 1 for step, b in zip(steps, counts[1:], strict=True) if b <= 2**24)
    assert all(step > 0 for step in steps)
