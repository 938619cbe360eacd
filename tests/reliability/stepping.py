"""Training loops that overflow where the test says, for every kind of optimizer: who decides about a step differs."""

from functools import partial

import pytest
import torch
from kit import OPTIMIZERS, backward, loss_of, mlp, snapshot, start
from torch import nn

from ampctx import AmpSession, GradScaler

ON_DEVICE = (
    *("FusedAdam", "FusedSGD", "FusedLAMB", "FusedNovoGrad", "FusedAdagrad", "LARC", "AdamW-fused", "SGD-fused"),
)
ON_HOST = ("AdamW-foreach", "SGD-plain", "Adagrad-plain")
# Who decides in each: ampctx's op, torch's op by a flag, the host.
one_of_each = pytest.mark.parametrize("name", ["FusedAdam", "AdamW-fused", "SGD-plain"])
every_optimizer = pytest.mark.parametrize("name", [*ON_DEVICE, *ON_HOST])
# Kinds of steps, with rates and momenta that 16 bits hold.
KINDS = {
    "plain": partial(OPTIMIZERS["SGD-plain"], lr=0.125, momentum=0.5),
    "foreach": partial(OPTIMIZERS["Adam-foreach"], lr=0.125),
    "torch-fused": partial(OPTIMIZERS["Adam-fused"], lr=0.125),
    "ampctx": partial(OPTIMIZERS["FusedAdam"], lr=0.125, eps=1e-3),
}
few_levels = pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])


def network(seed=0):
    """In eval mode, so that a forward leaves no trace."""
    return mlp(seed).eval()


def poisoned(model, poison):
    """``poison`` maps names of parameters to the value that the first element of their gradient gets."""
    for name, value in dict(poison).items():
        model.get_parameter(name).grad.view(-1)[0] = value


class Loop:
    """A model and an optimizer in a session of their own."""

    def __init__(self, session, name="FusedAdam", level="O1", lr=0.01, **options):
        self.session = session
        options = {"loss_scale": "dynamic", **options}
        self.model, self.optimizer = start(session, level, partial(OPTIMIZERS[name], lr=lr), network(), **options)

    def backward(self, seed=0, poison=(), loss_id=0):
        with self.session.scale_loss(loss_of(self.model, seed), self.optimizer, loss_id=loss_id) as scaled:
            scaled.backward()
            poisoned(self.model, poison)

    def step(self):
        self.optimizer.step()
        return self.outcome()

    def outcome(self):
        return self.session.outcome(self.optimizer)

    def iterate(self, seed=0, poison=()):
        self.backward(seed, poison)
        outcome = self.step()
        self.optimizer.zero_grad()
        return outcome

    def values(self):
        return snapshot(self.optimizer, self.model)


class ScalerLoop(Loop):
    """The same with a GradScaler, weights in fp32."""

    def __init__(self, name="FusedAdam", **options):
        self.model = network()
        self.optimizer = OPTIMIZERS[name](self.model.parameters())
        self.scaler = GradScaler("cpu", **options)

    def backward(self, seed=0, poison=()):
        self.scaler.scale(loss_of(self.model, seed)).backward()
        poisoned(self.model, poison)

    def step(self):
        self.scaler.step(self.optimizer)
        outcome = self.outcome()
        self.scaler.update()
        return outcome

    def outcome(self):
        return self.scaler.outcome(self.optimizer)


class Training:
    """A small model under a dynamic scale, in a session of its own."""

    def __init__(self, level, kind="plain", **options):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))
        self.session = AmpSession()
        make = KINDS[kind] if isinstance(kind, str) else kind
        self.model, self.optimizer = start(self.session, level, make, model, loss_scale="dynamic", **options)

    def loss(self, seed):
        return loss_of(self.model, seed, 8)

    def block(self, seed=1, factor=1.0, **kwargs):
        backward(self.session, self.loss(seed) * factor, self.optimizer, **kwargs)

    def iterate(self, seed=1):
        self.optimizer.zero_grad()
        self.block(seed)
        self.optimizer.step()
