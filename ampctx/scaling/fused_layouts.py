"""Gradients as torch's fused optimizers need them.

They walk parameter, gradient and state in memory order, all alike, and (torch 2.13) do not look whether the layouts
agree: a channels_last gradient of a contiguous parameter, as compiled autograd and hooks may leave it, is applied to
the wrong elements, and a parameter with gaps is stepped beside its elements. Those of ampctx.optimizers see to it by
themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ampctx._errors import AmpError
from ampctx.kernels.reference import is_dense, same_layout


@torch.no_grad()
def align_gradients(optimizer: Any) -> None:
    """Copies each gradient that lies in memory otherwise than its parameter into the parameter's layout, in the groups
    with ``fused``. No host sync.

    Raises:
        AmpError: a parameter whose elements do not fill one block of memory, by its place. Nothing has changed then.
    """
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
                    f"param_groups[{g}]['params'][{i}], whose elements do not fill one block of memory: make the "
                    "parameter contiguous, or pass fused=False"
                )
            if not same_layout(grad, p):
                others.append((p, grad))
    for p, grad in others:
        p.grad = torch.empty_like(p, dtype=grad.dtype, requires_grad=False).copy_(grad)
