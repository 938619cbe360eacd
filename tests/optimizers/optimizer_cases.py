"""Optimizers by name, and parameters for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from kit import OPTIMIZERS, muon, params_of
from torch import Tensor, nn

LOW = {"fp16": torch.float16, "bf16": torch.bfloat16}
DTYPES = {"fp32": torch.float32, **LOW, "fp64": torch.float64}
SHAPES = [(3, 5), (), (0,), (1,), (17,), (2, 3, 4, 4), (5, 4)]

# Each with options that use all of its state.
BY_NAME: dict[str, Callable[..., Any]] = {
    "adam": partial(OPTIMIZERS["FusedAdam"], weight_decay=0.1, amsgrad=True),
    "sgd": partial(OPTIMIZERS["FusedSGD"], weight_decay=0.1, dampening=0.1),
    "lamb": OPTIMIZERS["FusedLAMB"],
    "novograd": partial(OPTIMIZERS["FusedNovoGrad"], weight_decay=0.1),
    "adagrad": partial(OPTIMIZERS["FusedAdagrad"], weight_decay=0.1),
    "lion": partial(OPTIMIZERS["FusedLion"], weight_decay=0.1),
    "muon": muon,
    "mixed-lamb": OPTIMIZERS["FusedMixedPrecisionLamb"],
}
# Dtypes of parameters, and how an optimizer keeps what they round off.
MODES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "bf16": (torch.bfloat16, {}),
    "masters": (torch.float16, {"master_weights": True}),
    "split": (torch.bfloat16, {"master_weights": "split"}),
    "kahan": (torch.bfloat16, {"write_back": "kahan"}),
    "stochastic": (torch.float16, {"write_back": "stochastic"}),
}
# Those whose step is one op call for each bucket of parameters.
ONE_CALL = [name for name in BY_NAME if name != "muon"]
OWN_MASTERS = [name for name in BY_NAME if name != "mixed-lamb"]
STATE = {
    "adam": {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"},
    "sgd": {"momentum_buffer"},
    "lamb": {"exp_avg", "exp_avg_sq"},
    "novograd": {"exp_avg", "exp_avg_sq"},
    "adagrad": {"sum"},
    "lion": {"exp_avg"},
    "muon": {"momentum_buffer"},
    "mixed-lamb": {"exp_avg", "exp_avg_sq"},
}


def with_masters(name: str, params: Any, **options: Any) -> Any:
    if name != "mixed-lamb":
        return BY_NAME[name](params, master_weights=True, **options)
    params = list(params)
    return BY_NAME[name](params, reduced_precision_dtype=params[0].dtype, **options)


def make(name: str, mode: str) -> Any:
    dtype, options = MODES[mode]
    if "master_weights" in options and name == "mixed-lamb":
        return with_masters(name, parameters(dtype))
    return BY_NAME[name](parameters(dtype), **options)


def parameters(dtype: torch.dtype = torch.float32, shapes: Any = SHAPES, seed: int = 0) -> list[nn.Parameter]:
    """Parameters of all shapes; one channels_last, one transposed."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for shape in shapes:
        value = torch.randn(shape, generator=generator).to(dtype)
        if value.dim() == 4:
            value = value.to(memory_format=torch.channels_last)
        elif shape == (5, 4):
            value = value.t().contiguous().t()
        found.append(nn.Parameter(value))
    return found


def gradients(params: list, step: int, scale: float = 1.0) -> list[Tensor]:
    """Contiguous gradients, whatever the layout of the parameters."""
    generator = torch.Generator().manual_seed(1000 + step)
    return [(torch.randn(p.shape, generator=generator) * scale).to(p.dtype) for p in params]


def give(params: list, grads: list) -> None:
    for p, g in zip(params, grads, strict=True):
        p.grad = g


def run(optimizer: Any, steps: int = 3, first: int = 0) -> None:
    for step in range(first, first + steps):
        give(params_of(optimizer), gradients(params_of(optimizer), step))
        optimizer.step()


def like(optimizer: Any) -> list[nn.Parameter]:
    """New parameters with the values of the optimizer's."""
    return [nn.Parameter(p.detach().clone()) for p in params_of(optimizer)]
