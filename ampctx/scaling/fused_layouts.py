"""Lays out gradients as torch's fused optimizers need them.

These optimizers read parameter, gradient and state in memory order, and (torch 2.13) do not check that the layouts
agree. A channels_last gradient of a contiguous parameter, as compiled autograd and hooks may leave it, would update the
wrong elements. A parameter with gaps would be written between its elements. ampctx.optimizers handle this themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ampctx._errors import AmpError
from ampctx.kernels.reference import is_dense, same_layout


@torch.no_grad()
def align_gradients(optimizer: Any) -> None:
    """Copies gradients into the layout of their parameters where these differ, in groups with ``fused``. No host sync.

    Raises:
        AmpError: a parameter whose elements do not fill one block of memory, by name. Nothing has changed then.
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
                    f"param_groups[{g}]['params'][{i}], whose elements do not fill one block of memory. Make the "
                    "parameter contiguous, or pass fused=False."
                )
            if not same_layout(grad, p):
                others.append((p, grad))
    for p, grad in others:
        p.grad = torch.empty_like(p, dtype=grad.dtype, requires_grad=False).copy_(grad)
