"""update_scale on every backend: the rule of torch.amp, its hysteresis, and that no scale dies."""

import struct

import pytest
import torch

TINY = torch.finfo(torch.float32).tiny


def fp32(value):
    return struct.unpack("f", struct.pack("f", value))[0]


class State:
    """Scale and trackers of a backend, and the updates run on them."""

    def __init__(self, backend, scale=65536.0, growth=0, hysteresis=1, **rule):
        self.backend, self.rule = backend, {"hysteresis": hysteresis, **rule}
        self.scale = torch.full((), scale, device=backend.device)
        self.growth = torch.full((), growth, dtype=torch.int32, device=backend.device)
        self.hysteresis = torch.full((), hysteresis, dtype=torch.int32, device=backend.device)

    def update(self, found_inf):
        if not isinstance(found_inf, torch.Tensor):
            found_inf = self.backend.flag(found_inf)
        self.backend.update_scale(self.scale, self.growth, self.hysteresis, found_inf, **self.rule)
        return self

    @property
    def values(self):
        return self.scale.item(), self.growth.item(), self.hysteresis.item()


def overflows(n, seed=0):
    """Runs of clean steps with overflows between them, some in a row."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(n, generator=generator) < 0.2).float().tolist()


@pytest.mark.parametrize(("growth_factor", "backoff_factor"), [(2.0, 0.5), (1.1, 0.7), (3.0, 1 / 3)])
@pytest.mark.parametrize("growth_interval", [1, 3, 2000])
def test_hysteresis_1_is_the_rule_of_torch(backend, growth_factor, backoff_factor, growth_interval):
    factors = {"growth_factor": growth_factor, "backoff_factor": backoff_factor}
    state = State(backend, growth_interval=growth_interval, **factors)
    scale, growth = torch.full((), 65536.0), torch.zeros((), dtype=torch.int32)
    for found_inf in overflows(60):
        state.update(found_inf)
        torch._amp_update_scale_(scale, growth, torch.tensor(found_inf), growth_factor, backoff_factor, growth_interval)
        assert state.values[:2] == (scale.item(), growth.item())


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
@pytest.mark.parametrize(("min_scale", "max_scale"), [(0.0, float("inf")), (300.0, 5000.0)])
def test_run_for_run(backend, hysteresis, min_scale, max_scale):
    """The rule as its formula, step by step."""
    rule = {"growth_factor": 1.9, "backoff_factor": 0.4, "growth_interval": 2}
    state = State(backend, 1024.0, hysteresis=hysteresis, min_scale=min_scale, max_scale=max_scale, **rule)
    scale, growth, left = 1024.0, 0, hysteresis
    for step, found_inf in enumerate(overflows(200, seed=1)):
        state.update(found_inf)
        if found_inf:
            left, growth = max(left - 1, 0), 0
            if left == 0:
                scale = max(fp32(scale * 0.4), min_scale, TINY)
        else:
            left, growth = hysteresis, growth + 1
            if growth == 2:
                growth, scale = 0, min(fp32(scale * 1.9), max_scale)
        assert state.values == (scale, growth, left), f"step {step}"


@pytest.mark.parametrize("min_scale", [0.0, 1.0, 128.0])
def test_overflows_stop_at_the_floor(backend, min_scale):
    state = State(backend, min_scale=min_scale, growth_interval=20)
    for _ in range(200):
        state.update(1)
    assert state.values == (max(min_scale, TINY), 0, 0)
    for _ in range(20):
        state.update(0)
    assert state.values == (2 * max(min_scale, TINY), 0, 1)


@pytest.mark.parametrize("max_scale", [float("inf"), 2.0**24, 100_000.0])
def test_growth_never_reaches_inf(backend, max_scale):
    state = State(backend, growth_interval=1, max_scale=max_scale)
    for _ in range(300):
        state.update(0)
    assert state.values == (min(max_scale, 2.0**127), 0, 1)


def test_a_scale_beyond_max_scale_stays_until_it_would_grow(backend):
    state = State(backend, 1000.0, growth_interval=2, max_scale=100.0)
    assert state.update(0).values == (1000.0, 1, 1)
    assert state.update(0).values == (100.0, 0, 1)


@pytest.mark.parametrize("scale", [65536.0, 1.0, 3.0, 1e-30, TINY, 3e38])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_block_factors(backend, scale, shape):
    given = torch.full(shape, scale, device=backend.device)
    factors = backend.block_factors(given)
    given.fill_(7.0)
    expected = [fp32(scale), (torch.ones(()) / torch.tensor(scale)).item(), 0.0]
    assert [f.item() for f in factors] == expected
    assert {(f.shape, f.dtype, f.device) for f in factors} == {(torch.Size(()), torch.float32, given.device)}
    assert len({f.data_ptr() for f in factors}) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_counts_of_skips(backend, dtype):
    """Steps of a loss, and every other step of a second one."""
    counts, expected = torch.zeros(8, device=backend.device), [0.0] * 8
    for step, found_inf in enumerate(overflows(40, seed=2)):
        flags = [found_inf, step % 3 == 0]
        is_skipped = any(flags[: 1 + step % 2])
        step_flag = backend.flag(is_skipped, dtype)
        for slot in range(1 + step % 2):
            scale = torch.full((), 2.0**step, device=backend.device)
            backend.count_skip(counts, step_flag, backend.flag(flags[slot], dtype), scale, slot, slot == 0)
            expected[2 + 2 * slot] += flags[slot]
            expected[3 + 2 * slot] = 2.0**step
        expected[0] += is_skipped
        expected[1] = expected[1] + 1 if is_skipped else 0
        assert counts.tolist() == expected
    assert expected[0] > expected[2] > 2
    assert expected[6:] == [0, 0]


def test_repeated_checks_that_move_the_scale(backend):
    """What blocks of a GPU count by is as it was after each call."""
    tensors, state = backend.randn([7000, 1, 9000]), State(backend, growth_interval=2)
    trackers = state.scale, state.growth, state.hysteresis
    first = backend.l2norm_and_update(tensors, backend.flag(), 0.5, trackers, **state.rule)
    for i in range(2, 8):
        again = backend.l2norm_and_update(tensors, backend.flag(), 0.5, trackers, **state.rule)
        assert all(map(torch.equal, first, again))
        assert state.values[1] == i % 2
