"""Training loops that overflow where the test says, for every kind of optimizer: who decides about a step differs."""

import pytest
import torch
from torch import nn

from ampctx import GradScaler, optimizers

ON_DEVICE = {
    "FusedAdam": lambda p, lr=0.01: optimizers.FusedAdam(p, lr=lr),
    "FusedSGD": lambda p, lr=0.01: optimizers.FusedSGD(p, lr=lr, momentum=0.9),
    "FusedLAMB": lambda p, lr=0.01: optimizers.FusedLAMB(p, lr=lr),
    "FusedNovoGrad": lambda p, lr=0.01: optimizers.FusedNovoGrad(p, lr=lr),
    "FusedAdagrad": lambda p, lr=0.01: optimizers.FusedAdagrad(p, lr=lr),
    "torch-fused-AdamW": lambda p, lr=0.01: torch.optim.AdamW(p, lr=lr, fused=True),
    "torch-fused-SGD": lambda p, lr=0.01: torch.optim.SGD(p, lr=lr, momentum=0.9, fused=True),
}
ON_HOST = {
    "foreach-AdamW": lambda p, lr=0.01: torch.optim.AdamW(p, lr=lr, foreach=True),
    "plain-SGD": lambda p, lr=0.01: torch.optim.SGD(p, lr=lr, momentum=0.9, foreach=False),
    "plain-Adagrad": lambda p, lr=0.01: torch.optim.Adagrad(p, lr=lr, foreach=False),
}
OPTIMIZERS = {**ON_DEVICE, **ON_HOST}
LEVELS = ("O0", "O1", "O2", "O5")
INF, NAN = float("inf"), float("nan")

every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)
every_level = pytest.mark.parametrize("level", LEVELS)


def network(seed=0):
    """BatchNorm stays fp32 at O2 and O5: there are parameters with masters and without. In eval mode, so that a forward
    leaves no trace."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).eval()


def loss_of(model, seed):
    data = torch.randn(16, 4, generator=torch.Generator().manual_seed(seed))
    return model(data).float().square().mean()


def values(optimizer, model):
    """Every weight and piece of optimizer state, as copies."""
    tensors = list(model.parameters())
    for group in optimizer.param_groups:
        for p in group["params"]:
            tensors += [p, *(v for v in optimizer.state.get(p, {}).values() if isinstance(v, torch.Tensor))]
    return [t.detach().clone() for t in tensors]


def assert_same_bits(before, after):
    assert len(before) == len(after)
    for a, b in zip(before, after, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


class Loop:
    """A model and an optimizer in a session of their own.

    Args of ``iterate``: ``poison`` maps names of parameters to the value that the first element of their gradient gets.
    """

    def __init__(self, session, name="FusedAdam", level="O1", lr=0.01, **options):
        self.session = session
        self.model = network()
        self.optimizer = OPTIMIZERS[name](self.model.parameters(), lr)
        options = {"loss_scale": "dynamic", "verbosity": 0, **options}
        session.initialize(self.model, self.optimizer, opt_level=level, **options)

    def backward(self, seed=0, poison=(), loss_id=0):
        with self.session.scale_loss(loss_of(self.model, seed), self.optimizer, loss_id=loss_id) as scaled:
            scaled.backward()
            for name, value in dict(poison).items():
                self.model.get_parameter(name).grad.view(-1)[0] = value

    def iterate(self, seed=0, poison=()):
        self.backward(seed, poison)
        self.optimizer.step()
        outcome = self.session.outcome(self.optimizer)
        self.optimizer.zero_grad()
        return outcome

    def values(self):
        return values(self.optimizer, self.model)


class ScalerLoop:
    """The same with a GradScaler, weights in fp32."""

    def __init__(self, name="FusedAdam", **options):
        self.model = network()
        self.optimizer = OPTIMIZERS[name](self.model.parameters())
        self.scaler = GradScaler("cpu", **options)

    def backward(self, seed=0, poison=()):
        self.scaler.scale(loss_of(self.model, seed)).backward()
        for name, value in dict(poison).items():
            self.model.get_parameter(name).grad.view(-1)[0] = value

    def iterate(self, seed=0, poison=()):
        self.backward(seed, poison)
        self.scaler.step(self.optimizer)
        outcome = self.scaler.outcome(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return outcome

    def values(self):
        return values(self.optimizer, self.model)
