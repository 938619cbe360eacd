"""A scaler, a parameter and an optimizer that several tests of GradScaler start from."""

import torch
from torch import nn

from ampctx.scaling.grad_scaler import GradScaler


def parameter(grad, dtype=torch.float32):
    p = nn.Parameter(torch.ones(len(grad), dtype=dtype))
    p.grad = torch.tensor(grad, dtype=dtype)
    return p


def ready(*parameters, scaler=None, scale=8.0, optimizer=torch.optim.SGD, **kwargs):
    """A scaler whose scale lives on the CPU, and an optimizer with gradients."""
    scaler = scaler or GradScaler("cpu", init_scale=scale)
    scaler.scale(torch.ones(()))
    return scaler, optimizer(parameters, lr=1.0, **kwargs)
