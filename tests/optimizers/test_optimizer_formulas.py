"""Every option of every optimizer against an fp64 run of its formula.

The bound: at most twice the error that torch.optim's fp32 optimizer makes against the same fp64 run or, where torch
has no such optimizer or option, that the formula makes in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from formulas import Formula
from optimizer_cases import give, gradients, parameters

from ampctx import optimizers

STEPS = 100


@dataclass(frozen=True)
class Case:
    """``options`` of ours; ``torch`` makes torch.optim's counterpart, if there is one."""

    cls: type
    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    torch: Any = None

    @property
    def complete(self) -> dict[str, Any]:
        eps = {"adam": 1e-8, "lamb": 1e-6, "novograd": 1e-8, "adagrad": 1e-10}.get(self.kind)
        return {"lr": 0.02, **({} if eps is None else {"eps": eps}), **self.options}


def case(cls, kind, theirs=None, twin=True, **options):
    return Case(cls, kind, options, partial(theirs, lr=0.02, **options) if theirs and twin else None)


def adam(twin=True, adam_w=False, **options):
    with_torch = partial(torch.optim.AdamW if adam_w else torch.optim.Adam, lr=0.02, **{"weight_decay": 0.0, **options})
    return Case(optimizers.FusedAdam, "adam", {**options, "adam_w_mode": adam_w}, with_torch if twin else None)


sgd = partial(case, optimizers.FusedSGD, "sgd", torch.optim.SGD)
adagrad = partial(case, optimizers.FusedAdagrad, "adagrad", torch.optim.Adagrad)
lion, lamb = partial(case, optimizers.FusedLion, "lion"), partial(case, optimizers.FusedLAMB, "lamb")
novograd = partial(case, optimizers.FusedNovoGrad, "novograd")
CASES = {
    "adam": adam(),
    "adam-decay": adam(weight_decay=0.1),
    "adam-amsgrad": adam(amsgrad=True),
    "adam-maximize": adam(maximize=True),
    "adam-betas-eps": adam(betas=(0.5, 0.9), eps=1e-3),
    "adam-uncorrected": adam(twin=False, bias_correction=False, weight_decay=0.1),
    "adamw": adam(adam_w=True),
    "adamw-decay": adam(adam_w=True, weight_decay=0.1),
    "adamw-amsgrad-maximize": adam(adam_w=True, weight_decay=0.1, amsgrad=True, maximize=True),
    "adamw-uncorrected": adam(twin=False, adam_w=True, bias_correction=False, weight_decay=0.1),
    "sgd": sgd(),
    "sgd-decay": sgd(weight_decay=0.1),
    "sgd-momentum": sgd(momentum=0.9),
    "sgd-dampening": sgd(momentum=0.9, dampening=0.3, weight_decay=0.1),
    "sgd-nesterov": sgd(momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd-maximize": sgd(momentum=0.9, maximize=True),
    "sgd-decay-after": sgd(twin=False, momentum=0.9, weight_decay=0.1, wd_after_momentum=True),
    "sgd-decay-after-nesterov": sgd(twin=False, momentum=0.9, weight_decay=0.1, nesterov=True, wd_after_momentum=True),
    "adagrad": adagrad(),
    "adagrad-decay": adagrad(weight_decay=0.1, eps=1e-5),
    "adagrad-maximize": adagrad(maximize=True),
    "adagrad-w": adagrad(twin=False, weight_decay=0.1, adagrad_w_mode=True),
    "lion": lion(),
    "lion-decay": lion(weight_decay=0.1),
    "lion-betas": lion(betas=(0.5, 0.8)),
    "lion-maximize": lion(maximize=True, weight_decay=0.1),
    "lamb": lamb(),
    "lamb-l2": lamb(weight_decay=0.1, adam_w_mode=False),
    "lamb-no-decay": lamb(weight_decay=0.0),
    "lamb-nvlamb": lamb(weight_decay=0.0, use_nvlamb=True),
    "lamb-no-averaging": lamb(grad_averaging=False),
    "lamb-uncorrected": lamb(bias_correction=False),
    "lamb-no-clipping": lamb(max_grad_norm=0.0),
    "lamb-clipping-none": lamb(max_grad_norm=None),
    "lamb-loose-clipping": lamb(max_grad_norm=1e6),
    "lamb-maximize": lamb(maximize=True),
    "novograd": novograd(),
    "novograd-decay": novograd(weight_decay=0.1),
    "novograd-inside": novograd(weight_decay=0.1, reg_inside_moment=True),
    "novograd-inf": novograd(norm_type=0),
    "novograd-inf-zero": novograd(norm_type=0, init_zero=True),
    "novograd-init-zero": novograd(init_zero=True, weight_decay=0.1),
    "novograd-no-averaging": novograd(grad_averaging=False),
    "novograd-uncorrected": novograd(bias_correction=False),
    "novograd-maximize": novograd(maximize=True, betas=(0.95, 0.98)),
}


def error(found, exact):
    """The largest error of all elements."""
    return max((a.detach().double() - b).abs().max().item() for a, b in zip(found, exact, strict=True) if b.numel())


@pytest.mark.full(but=24)
@pytest.mark.parametrize("name", CASES)
def test_against_fp64(name):
    """What a run on masters is, too: test_optimizer_masters.py."""
    case, ours = CASES[name], parameters()
    optimizer = case.cls(ours, **case.complete)
    exact = Formula(case.kind, [p.detach().double() for p in ours], case.complete)
    twin = [p.detach().clone() for p in ours]
    by_torch = case.torch([p.requires_grad_() for p in twin]) if case.torch else None
    by_formula = Formula(case.kind, twin, case.complete)
    for i in range(STEPS):
        grads = gradients(ours, i, scale=0.1)
        give(ours, grads)
        optimizer.step()
        exact.step(grads)
        if by_torch is None:
            by_formula.step(grads)
        else:
            give(twin, grads)
            by_torch.step()
    of_torch = error(twin, exact.params)
    assert 0 < of_torch < 1e-3
    assert error(ours, exact.params) <= 2 * of_torch


@pytest.mark.parametrize(
    "name", ["adamw-amsgrad-maximize", "sgd-dampening", "adagrad-decay", "lion-decay", "lamb", "novograd-inf"]
)
def test_fp64_parameters_are_stepped_in_fp64(name):
    case, ours = CASES[name], parameters(torch.float64)
    # The norms of NovoGrad are fp32 whatever the parameters.
    tolerance = 1e-5 if case.kind == "novograd" else 1e-11
    exact = Formula(case.kind, [p.detach().clone() for p in ours], case.complete)
    optimizer = case.cls(ours, **case.complete)
    for i in range(20):
        grads = gradients(ours, i, scale=0.1)
        give(ours, grads)
        optimizer.step()
        exact.step(grads)
    torch.testing.assert_close([p.detach() for p in ours], exact.params, rtol=tolerance, atol=tolerance)
    state = optimizer.state[ours[0]]
    assert all(t.dtype == torch.float64 for t in state.values() if t.shape == ours[0].shape)
