"""Which gradient an optimizer sees after 1, 2 and 3 backward passes that reach some parameters each, or none.

Every row of apex's tables for new and stashed gradients occurs, at every level and for scales of 1, 128 and dynamic.
apex itself lost fp32 gradients at a static scale of 1.0 with master weights.
"""

import itertools

import pytest
import torch
from apex import amp
from apex.optimizers import FusedSGD
from kit import every_level
from l0 import Mixed, assert_exact, initialize_mixed, low_of

FACTORS = (0.5, -0.125, 0.25)
REACHED = {"none": (), "wide": ("wide",), "narrow": ("narrow",), "both": ("wide", "narrow")}


def loss_of(model, reached, factor):
    """A loss whose gradient is ``factor`` in every element of the parameters that it reaches."""
    zero = torch.zeros((), requires_grad=True)
    return sum((factor * getattr(model, name).float().sum() for name in REACHED[reached]), zero)


def expected_grad(pattern, name):
    """The sum over the passes that reach a parameter, None where there is no such pass."""
    parts = [factor for reached, factor in zip(pattern, FACTORS, strict=False) if name in REACHED[reached]]
    return torch.full((3,), sum(parts), dtype=torch.float64) if parts else None


@pytest.mark.full(but=36)
@pytest.mark.parametrize("make", [torch.optim.SGD, FusedSGD], ids=["SGD", "FusedSGD"])
@pytest.mark.parametrize("delayed", [False, True], ids=["each-unscaled", "last-unscales"])
@pytest.mark.parametrize("passes", [1, 2, 3])
@pytest.mark.parametrize("scale", [1.0, 128.0, "dynamic"])
@every_level
def test_every_pattern(level, scale, passes, delayed, make):
    for pattern in itertools.product(REACHED, repeat=passes):
        model = Mixed(0, low_of(level))
        start = {name: p.detach().double() for name, p in model.named_parameters()}
        optimizer = make(model.parameters(), lr=0.5)
        initialize_mixed(model, optimizer, level, loss_scale=scale)
        for i, reached in enumerate(pattern):
            delay = delayed and i < passes - 1
            with amp.scale_loss(loss_of(model, reached, FACTORS[i]), optimizer, delay_unscale=delay) as scaled:
                scaled.backward()
        for name, p in zip(start, amp.master_params(optimizer), strict=True):
            grad = expected_grad(pattern, name)
            assert (p.grad is None) == (grad is None), (pattern, name)
            if grad is not None:
                assert_exact(p.grad, grad)
        optimizer.step()
        for name, value in start.items():
            grad = expected_grad(pattern, name)
            assert_exact(getattr(model, name), value if grad is None else value - 0.5 * grad)
