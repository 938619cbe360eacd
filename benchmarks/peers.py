"""What ampctx's optimizers are measured against: torch's fused optimizer where it has one, else the formula in torch.

LAMB is in no torch. It is written here with the list operators that torch's own optimizers use (``torch._foreach_*``;
no public call works on lists), the fastest way to write it in Python, and without host reads. FusedNovoGrad and LARC
consist of such calls themselves: they are not measured.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ampctx import optimizers

LR, WEIGHT_DECAY, MOMENTUM = 1e-3, 1e-2, 0.9
BETA1, BETA2, EPS = 0.9, 0.99, 1e-6
TRUST, MAX_GRAD_NORM = 0.02, 1.0


class Lamb(torch.optim.Optimizer):
    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {"lr": LR})
        self.params: list[Tensor] = self.param_groups[0]["params"]
        self.m, self.v = ([torch.zeros_like(p) for p in self.params] for _ in range(2))
        self.taken = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.taken += 1
        grads = [p.grad for p in self.params]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        grads = torch._foreach_mul(grads, torch.clamp(MAX_GRAD_NORM / norm, max=1.0))
        torch._foreach_lerp_(self.m, grads, 1 - BETA1)
        torch._foreach_mul_(self.v, BETA2)
        torch._foreach_addcmul_(self.v, grads, grads, 1 - BETA2)
        denominators = torch._foreach_sqrt(self.v)
        torch._foreach_div_(denominators, (1 - BETA2**self.taken) ** 0.5)
        torch._foreach_add_(denominators, EPS)
        update = torch._foreach_div(self.m, 1 - BETA1**self.taken)
        torch._foreach_div_(update, denominators)
        torch._foreach_add_(update, self.params, alpha=WEIGHT_DECAY)
        of_w, of_u = (torch.stack(torch._foreach_norm(tensors)) for tensors in (self.params, update))
        ratios = torch.where((of_w != 0) & (of_u != 0), of_w / of_u, 1.0)
        torch._foreach_mul_(update, list(ratios.unbind()))
        torch._foreach_add_(self.params, update, alpha=-LR)


# --- the optimizers of a name -----------------------------------------------------------------------------------------

_ADAM = {"lr": LR, "betas": (BETA1, BETA2), "eps": EPS, "weight_decay": WEIGHT_DECAY}
_SGD = {"lr": LR, "momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY}
_ADAGRAD = {"lr": LR, "eps": 1e-10, "weight_decay": WEIGHT_DECAY}
_LAMB = {**_ADAM, "max_grad_norm": MAX_GRAD_NORM}

_OURS = {"FusedAdam": _ADAM, "FusedSGD": _SGD, "FusedAdagrad": _ADAGRAD, "FusedLAMB": _LAMB}
_TORCH = {
    "FusedAdam": (torch.optim.AdamW, _ADAM),
    "FusedSGD": (torch.optim.SGD, _SGD),
    "FusedAdagrad": (torch.optim.Adagrad, _ADAGRAD),
    "torch-Adam": (torch.optim.Adam, {"lr": LR}),
}

OPTIMIZERS = (*_OURS, "torch-Adam")
# fp32 numbers of state that an optimizer reads and writes for each weight.
STATES = {name: 1 if name in ("FusedSGD", "FusedAdagrad") else 2 for name in OPTIMIZERS}
# Types of state below fp32, and the optimizers that take them.
STATE_DTYPES = {"bf16": torch.bfloat16, "8bit": "8bit"}
TAKE_STATE_DTYPE = ("FusedAdam", "FusedSGD", "FusedLAMB")

# AdamW of packages that pip installs and that run on a CPU: the package's name for pip, module, class, options.
_ADAMW = {
    "optimi": ("torch-optimi", "optimi", "AdamW", {"foreach": True}),
    "bitsandbytes": ("bitsandbytes", "bitsandbytes.optim", "AdamW32bit", {}),
    "bitsandbytes-8bit": ("bitsandbytes", "bitsandbytes.optim", "AdamW8bit", {}),
    "torchao-8bit": ("torchao", "torchao.optim", "AdamW8bit", {}),
    "deepspeed": ("deepspeed", "deepspeed.ops.adam", "DeepSpeedCPUAdam", {"adamw_mode": True}),
}
# Their state has 8 bits for each weight, so their weights are not those of AdamW and nothing compares them.
INEXACT = ("bitsandbytes-8bit", "torchao-8bit")

# How far weights may lie apart after the rounds: the same formula in fp32, in another order of operations and with
# sums in another order, a few steps on.
RTOL, ATOL = 1e-4, 2e-6

Make = Callable[[Iterable[Tensor]], Any]


def ours(name: str, params: Iterable[Tensor], **more: Any) -> Any:
    """ampctx's optimizer of that name; "torch-Adam" is torch's own, for what amp makes of any optimizer. ``more`` goes
    to a Fused one."""
    if name == "torch-Adam":
        return torch.optim.Adam(params, lr=LR, fused=True)
    if name == "Offloaded":
        return optimizers.Offloaded(optimizers.FusedAdam, params, **_ADAM, **more)
    return getattr(optimizers, name)(params, **_OURS[name], **more)


def peer(name: str, against: str, device: str) -> Make:
    """The same optimizer of another package.

    Raises:
        LookupError: ``against`` is not installed, or has no such optimizer.
    """
    if against in _ADAMW:
        package, module, made, more = _ADAMW[against]
        if name != "FusedAdam":
            raise LookupError(f"{against} stands beside FusedAdam alone, not {name}")
        if not importlib.util.find_spec(module.partition(".")[0]):
            raise LookupError(f"{package} is not installed here: pip install --no-deps {package}")
        return lambda params: getattr(importlib.import_module(module), made)(params, **_ADAM, **more)
    if name == "FusedLAMB":
        if against == "torch-default":
            raise LookupError(f"torch has no {name}; its formula in torch._foreach calls goes by torch-fused")
        return Lamb
    kind, options = _TORCH[name]
    how = {"fused": True} if against == "torch-fused" else {}
    if how and kind is torch.optim.Adagrad and device != "cpu":  # torch has a fused one for the CPU alone
        how = {"foreach": True}
    return lambda params: kind(params, **options, **how)
