"""A loss scale that grows for 100,000 clean steps stays finite and within its bounds."""

import math

import pytest
import torch
from stepping import Loop, ScalerLoop, one_of_each

from ampctx.scaling.loss_scale import LossScale

STEPS = 100_000
FP32_MAX = torch.finfo(torch.float32).max


@pytest.mark.parametrize("growth", [2.0, 1.5, 1e30])
@pytest.mark.parametrize("ceiling", [None, 2.0**24, 1000.0, FP32_MAX])
def test_a_hundred_thousand_clean_updates(ceiling, growth):
    scale = LossScale.from_option("dynamic", None, ceiling)
    scale.growth_interval, scale.growth_factor = 1, growth
    clean = torch.zeros(())
    for _ in range(STEPS if growth == 2.0 and ceiling is None else 1000):
        scale.update(clean)
    largest = scale.value()
    assert math.isfinite(largest)
    assert 0 < largest <= (FP32_MAX if ceiling is None else ceiling)
    scale.scale_on("cpu")
    assert scale.inv_scale().value > 0
    scale.update(torch.ones(()))
    assert scale.value() == pytest.approx(largest / 2, rel=1e-6)


@pytest.mark.parametrize("ceiling", [None, 2.0**24, 2.0**17])
@one_of_each
def test_steps_of_a_session(session, name, ceiling):
    """The scale climbs to its bound, or to where the loss overflows, and training goes on."""
    loop = Loop(session, name, "O2", lr=1e-6, max_loss_scale=ceiling)
    session.loss_scales[0].growth_interval = 1
    scales = []
    for seed in range(300):
        outcome = loop.iterate(seed)
        scales.append(outcome.scale)
    assert all(0 < scale < math.inf for scale in scales)
    assert max(scales) <= (FP32_MAX if ceiling is None else ceiling)
    assert all(torch.isfinite(v).all() for v in loop.values())


@pytest.mark.parametrize("ceiling", [math.inf, 2.0**24])
@one_of_each
def test_steps_of_a_grad_scaler(name, ceiling):
    loop = ScalerLoop(name, growth_interval=1, max_scale=ceiling)
    scales = [loop.iterate(seed).scale for seed in range(300)]
    assert max(scales) > 2.0**16
    assert all(0 < scale <= min(ceiling, FP32_MAX) for scale in scales)
    assert all(torch.isfinite(v).all() for v in loop.values())
