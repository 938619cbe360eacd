"""What the L0 tests share: a model whose training is exact in 16 bits, and apex's private state.

All numbers are sums of few powers of two, so that an fp64 run without amp says exactly what fp32, fp16 and bf16 give at
every level: scaling by powers of two, masters, stashing and unscaling may then change no bit.
"""

from contextlib import contextmanager

import torch
from apex import amp
from torch import nn

ZERO = ("none", "model", "optimizer")


def low_of(level):
    """The 16-bit type of a level."""
    return torch.bfloat16 if level in ("O4", "O5") else torch.float16


class Mixed(nn.Module):
    """A ``wide`` fp32 and a ``narrow`` 16-bit parameter, whose gradients depend on each other's value."""

    def __init__(self, number, narrow_dtype):
        super().__init__()
        wide_dtype = torch.promote_types(narrow_dtype, torch.float32)
        self.wide = nn.Parameter(torch.tensor([1.0, -0.5, 2.0], dtype=wide_dtype) + number)
        self.narrow = nn.Parameter(torch.tensor([1.0, 0.5, 2.0], dtype=narrow_dtype))

    def forward(self, x):
        return (x * self.wide * self.narrow).sum()


def reference_model(number):
    return Mixed(number, torch.float64)


def batch(iteration, which, dtype=torch.float32):
    """The input of a loss: two losses get different ones, in turns."""
    return torch.tensor([1.0, 1.0, -1.0], dtype=dtype) * (1.0 if (iteration + which) % 2 == 0 else -0.5)


def assert_exact(actual, expected):
    """Equal to an fp64 value that the type of ``actual`` holds."""
    assert torch.equal(expected.to(actual.dtype).double(), expected), "the reference does not fit the type"
    assert torch.equal(actual.detach().double(), expected), (actual, expected)


def zero_grads(how, models, optimizers):
    if how == "none":
        for model in models:
            for p in model.parameters():
                p.grad = None
    for owner in models if how == "model" else optimizers if how == "optimizer" else ():
        owner.zero_grad()


@contextmanager
def incoming_16_bit():
    """Within it ``initialize`` takes models that hold 16-bit weights."""
    amp._amp_state.allow_incoming_model_not_fp32 = True
    try:
        yield
    finally:
        amp._amp_state.allow_incoming_model_not_fp32 = False


@contextmanager
def casts(low, **options):
    """Per-op casts without an ``initialize``; gives the handle."""
    handle = amp.init(enabled=True, patch_type=low, **options)
    try:
        yield handle
    finally:
        handle._deactivate()
        assert not handle.is_active()


def set_scales(*values):
    """Starts the loss scalers at other values, the static ones too."""
    for scaler, value in zip(amp._amp_state.loss_scalers, values, strict=True):
        scaler._loss_scale = value


def scales():
    return [scaler.loss_scale() for scaler in amp._amp_state.loss_scalers]


def initialize_mixed(models, optimizers, level, **options):
    """``amp.initialize`` of models that are mixed already, as apex's tests call it: nothing is cast."""
    with incoming_16_bit():
        return amp.initialize(models, optimizers, opt_level=level, cast_model_type=False, verbosity=0, **options)
