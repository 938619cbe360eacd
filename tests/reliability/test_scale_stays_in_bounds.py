"""A loss scale that grows at each clean step stays finite and within its bounds, and training goes on."""

import pytest
import torch
from kit import INF
from stepping import Loop, ScalerLoop, one_of_each

FP32_MAX = torch.finfo(torch.float32).max


@pytest.mark.full(but=16)
@pytest.mark.parametrize("ceiling", [INF, 2.0**24, 2.0**17, 100000.0, FP32_MAX])
@pytest.mark.parametrize("growth", ["session", 2.0, 1.5, 1e30])
@one_of_each
def test_the_scale_climbs_to_its_bound_or_to_where_the_loss_overflows(session, name, growth, ceiling):
    """Of a session, and of a GradScaler with this growth factor."""
    if growth == "session":
        loop = Loop(session, name, "O2", lr=1e-6, max_loss_scale=None if ceiling == INF else ceiling)
        session.loss_scales[0].growth_interval = 1
    else:
        loop = ScalerLoop(name, growth_interval=1, growth_factor=growth, max_scale=ceiling)
    # A factor of 1.5 is at the largest number after 192 steps.
    scales = [loop.iterate(seed).scale for seed in range(200)]
    assert growth == "session" or max(scales) > 2.0**16
    assert all(0 < scale <= min(ceiling, FP32_MAX) for scale in scales)
    assert all(torch.isfinite(v).all() for v in loop.values())
