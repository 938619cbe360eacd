"""What ampctx's optimizers are measured against: torch's fused optimizer where it has one, else the formula in torch.

LAMB, NovoGrad and LARC are in no torch. They are written here with the list operators that torch's own optimizers use
(``torch._foreach_*``; no public call works on lists), the fastest way to write them in Python, and without host reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ampctx import optimizers

LR, WEIGHT_DECAY, MOMENTUM = 1e-3, 1e-2, 0.9
BETA1, BETA2, EPS = 0.9, 0.99, 1e-6
TRUST, MAX_GRAD_NORM = 0.02, 1.0


class _Formula(torch.optim.Optimizer):
    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {"lr": LR})
        self.params: list[Tensor] = self.param_groups[0]["params"]
        self.taken = 0

    def _zeros(self) -> list[Tensor]:
        return [torch.zeros_like(p) for p in self.params]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.taken += 1
        self._update([p.grad for p in self.params])

    def _update(self, grads: list[Tensor]) -> None:
        raise NotImplementedError


class Lamb(_Formula):
    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params)
        self.m, self.v = self._zeros(), self._zeros()

    def _update(self, grads: list[Tensor]) -> None:
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


class NovoGrad(_Formula):
    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params)
        self.m = self._zeros()
        self.norms: Tensor | None = None

    def _update(self, grads: list[Tensor]) -> None:
        norms = torch.stack(torch._foreach_norm(grads))
        if self.norms is not None:
            norms = (BETA2 * self.norms.square() + (1 - BETA2) * norms.square()).sqrt()
        self.norms = norms
        denominators = norms / (1 - BETA2**self.taken) ** 0.5 + EPS
        torch._foreach_lerp_(self.m, grads, 1 - BETA1)
        update = torch._foreach_div(self.m, 1 - BETA1**self.taken)
        torch._foreach_div_(update, list(denominators.unbind()))
        torch._foreach_add_(update, self.params, alpha=WEIGHT_DECAY)
        torch._foreach_add_(self.params, update, alpha=-LR)


class LarcSGD(_Formula):
    """LARC around torch's fused SGD."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params)
        self.sgd = torch.optim.SGD(self.params, lr=LR, momentum=MOMENTUM, fused=True)

    def _update(self, grads: list[Tensor]) -> None:
        of_w, of_g = (torch.stack(torch._foreach_norm(tensors)) for tensors in (self.params, grads))
        rates = torch.clamp(TRUST * of_w / (of_g + of_w * WEIGHT_DECAY + 1e-8) / LR, max=1.0)
        some = (of_w != 0) & (of_g != 0)
        torch._foreach_add_(grads, torch._foreach_mul(self.params, list((some * WEIGHT_DECAY).unbind())))
        torch._foreach_mul_(grads, list(torch.where(some, rates, 1.0).unbind()))
        self.sgd.step()


def _adagrad(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    params = list(params)  # torch has a fused Adagrad for the CPU alone
    on_cpu = params[0].device.type == "cpu"
    kind = {"fused": True} if on_cpu else {"foreach": True}
    return torch.optim.Adagrad(params, lr=LR, eps=1e-10, weight_decay=WEIGHT_DECAY, **kind)


Make = Callable[[Iterable[Tensor]], Any]

# name: (ampctx's, the peer, what the peer is)
OPTIMIZERS: dict[str, tuple[Make, Make, str]] = {
    "FusedAdam": (
        lambda p: optimizers.FusedAdam(p, lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=WEIGHT_DECAY),
        lambda p: torch.optim.AdamW(p, lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=WEIGHT_DECAY, fused=True),
        "torch.optim.AdamW(fused=True)",
    ),
    "FusedSGD": (
        lambda p: optimizers.FusedSGD(p, lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY),
        lambda p: torch.optim.SGD(p, lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY, fused=True),
        "torch.optim.SGD(fused=True)",
    ),
    "FusedAdagrad": (
        lambda p: optimizers.FusedAdagrad(p, lr=LR, eps=1e-10, weight_decay=WEIGHT_DECAY),
        _adagrad,
        "torch.optim.Adagrad, fused on the CPU, foreach on CUDA",
    ),
    "FusedLAMB": (
        lambda p: optimizers.FusedLAMB(
            p, lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=WEIGHT_DECAY, max_grad_norm=MAX_GRAD_NORM
        ),
        Lamb,
        "the formula in torch._foreach calls",
    ),
    "FusedMixedPrecisionLamb": (
        lambda p: optimizers.FusedMixedPrecisionLamb(
            p, lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=WEIGHT_DECAY, max_grad_norm=MAX_GRAD_NORM
        ),
        Lamb,
        "the formula in torch._foreach calls",
    ),
    "FusedNovoGrad": (
        lambda p: optimizers.FusedNovoGrad(p, lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=WEIGHT_DECAY),
        NovoGrad,
        "the formula in torch._foreach calls",
    ),
    "LARC": (
        lambda p: optimizers.LARC(optimizers.FusedSGD(p, lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)),
        LarcSGD,
        "the formula in torch._foreach calls, then torch.optim.SGD(fused=True)",
    ),
    "torch-Adam": (
        lambda p: torch.optim.Adam(p, lr=LR, fused=True),
        lambda p: torch.optim.Adam(p, lr=LR, fused=True),
        "the same torch.optim.Adam(fused=True)",
    ),
}
