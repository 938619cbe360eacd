"""Optimizers of any class: whether they skip steps by themselves, and the layout of gradients that they need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ampctx._errors import AmpError
from ampctx.kernels.reference import is_dense, same_layout
from ampctx.weights.step import declares


def skips_by_itself(optimizer: Any, before_backward: bool = False) -> bool:
    """Whether the optimizer skips by ``found_inf``: its class says so, or it is torch's with ``fused=True`` everywhere.
    Creates missing momentum buffers of torch's fused SGD.

    ``before_backward``: the step will evaluate the model first, so it is unknown which parameters have gradients.
    """
    flag = "_step_supports_amp_scaling"  # torch sets it on fused instances
    inner = getattr(optimizer, "optim", optimizer)  # for LARC, the optimizer inside decides
    of_class = hasattr(type(inner), flag)
    if of_class and inner is optimizer:
        return bool(getattr(optimizer, flag))
    if not declares(optimizer, flag):
        return False
    if of_class:
        return True
    is_fused = all(group.get("fused", True) for group in optimizer.param_groups)
    return is_fused and (not isinstance(inner, torch.optim.SGD) or set_up_momentum(inner, before_backward))


@torch.no_grad()
def set_up_momentum(optimizer: Any, before_backward: bool) -> bool:
    """Creates momentum buffers of zeros: torch (2.13) leaves those of a skipped first step uninitialized. False with
    dampening, where zeros would not give the same steps: the host must read the flag of the first one."""
    for group in optimizer.param_groups:
        if group["momentum"] == 0:
            continue
        steps = [p for p in group["params"] if (p.requires_grad if before_backward else p.grad is not None)]
        fresh = [p for p in steps if optimizer.state[p].get("momentum_buffer") is None]
        if fresh and group["dampening"] != 0:
            return False
        for p in fresh:
            optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
    return True


@torch.no_grad()
def align_gradients(optimizer: Any) -> None:
    """Copies gradients into the layout of their parameters where these differ, in groups with ``fused``. No host sync.

    torch's fused optimizers (2.13) read parameter, gradient and state in memory order, without a check that the layouts
    agree. AmpError for a parameter whose elements do not fill one block of memory; nothing has changed then."""
    others: list[tuple[Tensor, Tensor]] = []
    for g, group in enumerate(optimizer.param_groups):
        if not group.get("fused"):
            continue
        for i, p in enumerate(group["params"]):
            grad = p.grad
            if grad is None or grad.layout != torch.strided or (p.is_contiguous() and grad.is_contiguous()):
                continue
            if not is_dense(p):
                raise AmpError(
                    f"{type(optimizer).__name__} with fused=True steps the wrong memory of "
                    f"param_groups[{g}]['params'][{i}], whose elements do not fill one block. Make it "
                    "contiguous, or pass fused=False."
                )
            if not same_layout(grad, p):
                others.append((p, grad))
    for p, grad in others:
        p.grad = torch.empty_like(p, dtype=grad.dtype, requires_grad=False).copy_(grad)


def with_wrapped(optimizer: Any) -> list[Any]:
    """The optimizer, and the optimizers among its attributes, such as the one that LARC or SAM wraps, or in a list or
    dict of these."""
    found = [optimizer]
    for one in found:
        for value in getattr(one, "__dict__", {}).values():
            parts = list(value.values()) if isinstance(value, Mapping) else value
            inside = parts if type(parts) in (list, tuple) else [parts]
            found += [o for o in inside if isinstance(o, torch.optim.Optimizer) and o not in found]
    return found
