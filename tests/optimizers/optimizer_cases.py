"""Optimizers by name, parameters for them, and each optimizer's formula written out once more in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
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


# --- the formulas -----------------------------------------------------------------------------------------------------


@dataclass
class Formula:
    """One optimizer as its paper (or apex) defines it, tensor by tensor in the type of the parameters given."""

    kind: str
    params: list[Tensor]
    o: dict[str, Any]
    t: int = 0
    state: list[dict[str, Tensor]] = field(default_factory=list)

    def step(self, grads: list[Tensor]) -> None:
        self.t += 1
        o = self.o
        grads = [(-g if o.get("maximize") else g).to(p.dtype) for g, p in zip(grads, self.params, strict=True)]
        if not self.state:
            self.state = [{} for _ in grads]
        if self.kind == "lamb":
            norm, most = torch.cat([g.flatten() for g in grads]).norm(), o.get("max_grad_norm", 1.0)
            if most and norm > most:
                grads = [g / (norm / most) for g in grads]
        with torch.no_grad():
            for p, g, s in zip(self.params, grads, self.state, strict=True):
                getattr(self, self.kind)(p, g, s)

    def _average(self, s: dict[str, Tensor], name: str, beta: float, value: Tensor, weight: float) -> Tensor:
        s[name] = beta * s.get(name, torch.zeros_like(value)) + weight * value
        return s[name]

    def _corrections(self, beta1: float, beta2: float) -> tuple[float, float]:
        return (1 - beta1**self.t, 1 - beta2**self.t) if self.o.get("bias_correction", True) else (1.0, 1.0)

    def _direction(self, g: Tensor, s: dict[str, Tensor], beta3: float) -> Tensor:
        beta1, beta2 = self.o.get("betas", (0.9, 0.999))
        m = self._average(s, "m", beta1, g, beta3)
        v = self._average(s, "v", beta2, g * g, 1 - beta2)
        if self.o.get("amsgrad"):
            v = s["max"] = torch.maximum(s.get("max", torch.zeros_like(v)), v)
        c1, c2 = self._corrections(beta1, beta2)
        return (m / c1) / ((v / c2).sqrt() + self.o["eps"])

    def adam(self, p: Tensor, g: Tensor, s: dict[str, Tensor]) -> None:
        o, wd = self.o, self.o.get("weight_decay", 0.0)
        decoupled = o.get("adam_w_mode", True)
        u = self._direction(g if decoupled else g + wd * p, s, 1 - o.get("betas", (0.9, 0.999))[0])
        p -= o["lr"] * (u + wd * p if decoupled else u)

    def lamb(self, p: Tensor, g: Tensor, s: dict[str, Tensor]) -> None:
        o, wd = self.o, self.o.get("weight_decay", 0.01)
        decoupled = o.get("adam_w_mode", True)
        beta3 = 1 - o.get("betas", (0.9, 0.999))[0] if o.get("grad_averaging", True) else 1.0
        u = self._direction(g if decoupled else g + wd * p, s, beta3)
        u = u + wd * p if decoupled else u
        of_p, of_u = p.norm(), u.norm()
        scaled = (wd != 0 or o.get("use_nvlamb")) and of_p > 0 and of_u > 0
        p -= o["lr"] * (of_p / of_u if scaled else 1.0) * u

    def sgd(self, p: Tensor, g: Tensor, s: dict[str, Tensor]) -> None:
        o, wd, momentum = self.o, self.o.get("weight_decay", 0.0), self.o.get("momentum", 0.0)
        after = o.get("wd_after_momentum", False)
        if not after:
            g = g + wd * p
        if momentum:
            s["b"] = momentum * s["b"] + (1 - o.get("dampening", 0.0)) * g if "b" in s else g
            g = g + momentum * s["b"] if o.get("nesterov") else s["b"]
        p -= o["lr"] * (g + wd * p if after else g)

    def adagrad(self, p: Tensor, g: Tensor, s: dict[str, Tensor]) -> None:
        o, wd = self.o, self.o.get("weight_decay", 0.0)
        decoupled = o.get("adagrad_w_mode", False)
        g = g if decoupled else g + wd * p
        s["h"] = s.get("h", torch.zeros_like(p)) + g * g
        u = g / (s["h"].sqrt() + o["eps"])
        p -= o["lr"] * (u + wd * p if decoupled else u)

    def lion(self, p: Tensor, g: Tensor, s: dict[str, Tensor]) -> None:
        o, m, (beta1, beta2) = self.o, s.get("m", torch.zeros_like(p)), self.o.get("betas", (0.9, 0.99))
        p -= o["lr"] * (torch.sign(beta1 * m + (1 - beta1) * g) + o.get("weight_decay", 0.0) * p)
        s["m"] = beta2 * m + (1 - beta2) * g

    def novograd(self, p: Tensor, g: Tensor, s: dict[str, Tensor]) -> None:
        if p.numel() == 0:
            return
        o, wd = self.o, self.o.get("weight_decay", 0.0)
        beta1, beta2 = o.get("betas", (0.9, 0.999))
        c1, c2 = self._corrections(beta1, beta2)
        beta3 = 1 - beta1 if o.get("grad_averaging", True) else 1.0
        largest = o.get("norm_type", 2) == 0
        norm = g.abs().max() if largest else g.norm()
        old = s.get("n", torch.zeros_like(norm) if o.get("init_zero") else norm)
        s["n"] = beta2 * old + (1 - beta2) * norm if largest else (beta2 * old**2 + (1 - beta2) * norm**2).sqrt()
        d = s["n"] / c2**0.5 + o["eps"]
        if o.get("reg_inside_moment"):
            p -= o["lr"] * self._average(s, "m", beta1, g / d + wd * p, beta3) / c1
        else:
            p -= o["lr"] * (self._average(s, "m", beta1, g, beta3) / c1 / d + wd * p)


def like(optimizer: Any) -> list[nn.Parameter]:
    """New parameters with the values of the optimizer's."""
    return [nn.Parameter(p.detach().clone()) for p in params_of(optimizer)]
