"""Double backward in 16 bits: penalties on gradients, through convolutions and norms, as in fp64."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from kit import backward
from torch import Tensor, nn

# The norm, and whether the model trains.
NETS = {
    "batch-norm": (lambda: nn.BatchNorm2d(8), True),
    "frozen-batch-norm": (lambda: nn.BatchNorm2d(8), False),
    "instance-norm": (lambda: nn.InstanceNorm2d(8, affine=True), True),
    "group-norm": (lambda: nn.GroupNorm(2, 8), True),
    "layer-norm": (lambda: nn.LayerNorm([8, 6, 6]), True),
}


def net(name: str) -> nn.Module:
    norm, train = NETS[name]
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1),
        norm(),
        nn.Tanh(),
        nn.Conv2d(8, 4, 3, stride=2),
        nn.Flatten(),
        nn.Linear(16, 1),
    )
    with torch.no_grad():
        model(torch.randn(16, 2, 6, 6))  # running statistics that are none of a fresh module
    return model.train(train)


def batch() -> Tensor:
    return torch.randn(8, 2, 6, 6, generator=torch.Generator().manual_seed(5))


def r1(score: Tensor, x: Tensor, scale: float) -> Tensor:
    """The mean squared norm of the gradient at each sample."""
    (grad,) = torch.autograd.grad(score.sum() * scale, x, create_graph=True)
    return (grad.float() / scale).flatten(1).square().sum(1).mean()


def expected(model: nn.Module) -> list[Tensor]:
    x = batch().double().requires_grad_()
    model = copy.deepcopy(model).double()
    score = model(x)
    (F.softplus(score).mean() + 5 * r1(score, x, 1.0).double()).backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


def check(params: list[Tensor], wanted: list[Tensor], bound: float) -> None:
    """The error of all gradients together, in parts of their norm."""
    found = torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.float().flatten() for p in params])
    wanted = torch.cat([w.float().flatten() for w in wanted])
    assert (found - wanted).norm() < bound * wanted.norm()


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O5"])
def test_penalty_on_the_input_gradient(level, name, session):
    model = net(name)
    wanted = expected(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.initialize(model, optimizer, opt_level=level, loss_scale=256.0, verbosity=0)
    x = batch().requires_grad_()
    score = model(x)
    with session.disable_casts():
        penalty = r1(score, x, 256.0)
    backward(session, F.softplus(score).mean() + 5 * penalty, optimizer)
    params = list(session.master_params(optimizer))
    check(params, wanted, 3e-2 if level == "O5" else 1e-2)
