"""LARC around SGD under amp, against its formula computed here in fp64."""

import pytest
import torch
from apex import amp
from apex.parallel.LARC import LARC
from l0 import LEVELS, ROCM_LEVELS, low_of
from torch import nn

from ampctx.optimizers import FusedSGD

LR, DECAY, TRUST, EPS = 0.5, 0.125, 0.25, 1e-8


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[1.0, -2.0], [0.5, 4.0]]))
        self.unused = nn.Parameter(torch.ones(3))
        self.zero = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return (x @ self.weight + self.zero).sum()


def expected_steps(model, x, clip, n):
    """The weights after n steps of p -= lr a (g + decay p), or p -= lr g where a norm is 0."""
    ours = {name: p.detach().double() for name, p in model.named_parameters()}
    column = x.double().sum(0)
    grads = {"weight": column[:, None].expand(2, 2), "zero": torch.full((2,), float(len(x)), dtype=torch.float64)}
    for _ in range(n):
        for name, g in grads.items():
            p = ours[name]
            if p.norm() == 0:
                ours[name] = p - LR * g
                continue
            rate = TRUST * p.norm() / (g.norm() + DECAY * p.norm() + EPS)
            rate = min(rate / LR, 1.0) if clip else rate
            ours[name] = p - LR * rate * (g + DECAY * p)
    return ours


@pytest.mark.parametrize("make", [torch.optim.SGD, FusedSGD], ids=["SGD", "FusedSGD"])
@pytest.mark.parametrize("clip", [True, False], ids=["clip", "scale"])
@pytest.mark.parametrize("level", [*LEVELS, *ROCM_LEVELS])
def test_steps_follow_the_formula(level, clip, make):
    model = Net()
    optimizer = LARC(make(model.parameters(), lr=LR, weight_decay=DECAY), trust_coefficient=TRUST, clip=clip, eps=EPS)
    x = torch.tensor([[1.0, 0.5], [-0.25, 1.0]])
    expected = expected_steps(model, x, clip, 3)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, max_loss_scale=1024.0, verbosity=0)
    for _ in range(3):
        optimizer.zero_grad()
        with amp.scale_loss(model(x), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    masters = dict(zip(expected, amp.master_params(optimizer), strict=True))
    for name, value in expected.items():
        bound = 4e-3 if level == "O3" else 1e-5
        torch.testing.assert_close(masters[name].detach().double(), value, rtol=bound, atol=bound)
        low = 1e-5 if level in ("O0", "O1", "O4") else 2 * torch.finfo(low_of(level)).eps
        torch.testing.assert_close(getattr(model, name).detach().double(), value, rtol=low, atol=low)
