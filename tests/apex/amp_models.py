"""A model whose gradients are what the test says, and the optimizers that the tests here step it with."""

import torch
from apex import amp
from apex.optimizers import FusedAdam
from torch import nn

LOW = {"O1": torch.float32, "O2": torch.float16, "O5": torch.bfloat16}
OPTIMIZERS = {
    "FusedAdam": lambda params: FusedAdam(params, lr=0.125),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.125, momentum=0.5),
}


class Probe(nn.Module):
    """d loss / d weight is the factor for every element; 16-bit and fp32 parameters at O2 and O5."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 2.0))
        self.norm = nn.BatchNorm1d(2)

    def loss(self, factor):
        return sum((p.float() * factor).sum() for p in self.parameters())


def probe(level="O2", optimizer="SGD", **kwargs):
    """A fresh model and optimizer behind ``amp.initialize``, with a dynamic scale of 4096."""
    model = Probe()
    kwargs = {"loss_scale": "dynamic", "max_loss_scale": 4096.0, "verbosity": 0, **kwargs}
    return amp.initialize(model, OPTIMIZERS[optimizer](model.parameters()), opt_level=level, **kwargs)


def backward(model, optimizer, factor=1.0, **kwargs):
    with amp.scale_loss(model.loss(factor), optimizer, **kwargs) as scaled:
        scaled.backward()


def weights(optimizer):
    """Copies of what the optimizer steps."""
    return [p.detach().clone() for p in amp.master_params(optimizer)]


def same(a, b):
    return len(a) == len(b) and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))
