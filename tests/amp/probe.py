"""A model whose gradients are what the test says, and the steps that several tests take with it."""

import torch
from torch import nn

from ampctx import amp


class Probe(nn.Module):
    """One weight of each kind, gradients under the caller's control: d loss / d weight = the factor, for every
    element."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 2.0))
        self.norm = nn.BatchNorm1d(2)

    def loss(self, factor):
        return sum((p.float() * factor).sum() for p in self.parameters())


# The highest start at which a gradient of 8 still fits into fp16.
START = 4096.0


def probe(session, level, n_losses=1, **kwargs):
    model = Probe()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    kwargs = {"max_loss_scale": START, "verbosity": 0, **kwargs}
    session.initialize(model, optimizer, opt_level=level, num_losses=n_losses, **kwargs)
    return model, optimizer


def backward(session, model, optimizer, factor, **kwargs):
    with session.scale_loss(model.loss(factor), optimizer, **kwargs) as scaled:
        scaled.backward()


def grads(optimizer):
    return [p.grad for p in amp.master_params(optimizer)]


def scale_value(session, i=0):
    return session.state_dict()[f"loss_scaler{i}"]["loss_scale"]


def overflow(session, model, optimizer, **kwargs):
    backward(session, model, optimizer, float("inf"), **kwargs)
