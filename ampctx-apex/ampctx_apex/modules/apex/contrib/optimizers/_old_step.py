"""The ``step`` arguments of the old fused optimizers, whose wrapper held the gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ampctx import AmpTypeError, AmpValueError, foreach
from ampctx.foreach import Factor, FoundInf, PerDevice
from ampctx.spi import check_scale

Lists = list[list[Tensor | None]]


def _by_group(name: str, given: Any, groups: list[dict[str, Any]]) -> Lists:
    """A list for each param group, as long as its params: of None where nothing is given. One flat list of tensors, or
    an iterator, is that of a single group."""
    if given is None:
        return [[None] * len(group["params"]) for group in groups]
    if not isinstance(given, Iterable):
        raise AmpTypeError(f"{name} must be a list of tensors, or of lists of tensors, got {type(given).__name__}")
    given = list(given)
    lists = [list(part) for part in given] if given and isinstance(given[0], (list, tuple)) else [given]
    if [len(part) for part in lists] != [len(group["params"]) for group in groups]:
        raise AmpValueError(
            f"{name} has {[len(part) for part in lists]} tensors by group, the optimizer has "
            f"{[len(group['params']) for group in groups]} parameters"
        )
    for part in lists:
        for t in part:
            if t is not None and not isinstance(t, Tensor):
                raise AmpTypeError(f"{name} must hold tensors or None, got {type(t).__name__}")
    return lists


def _factor(scale: float, most: float, norm: Any, grads: list[Tensor]) -> Factor:
    """The factor for gradients: 1 / scale, smaller if their norm exceeds ``most`` (0: no bound)."""
    if not most or not grads:
        return 1.0 / scale
    # A norm that is given is that of the scaled gradients, too.
    total = foreach.l2norm(grads, FoundInf()) if norm is None else torch.as_tensor(norm).reshape(()).float()
    excess = torch.clamp((total / scale + 1e-6) / most, min=1.0)
    return PerDevice((excess * scale).reciprocal())


@torch.no_grad()
def old_step(
    optimizer: Any,
    run: Callable[[], Any],
    closure: Callable[[], Any] | None,
    grads: Any,
    output_params: Any,
    scale: float,
    grad_norms: Sequence[Any] | None,
) -> Any:
    """One step of ``run`` on gradients from elsewhere.

    Args:
        run: the optimizer's step on what is in ``.grad``.
        closure: evaluated first, with gradients enabled.
        grads: in place of ``.grad``, of any floating dtype; None in it leaves that parameter's ``.grad``.
        output_params: what the new values are copied to, rounded.
        scale: gradients are divided by it.
        grad_norms: for each group the L2 norm of its gradients as they are given, against its ``max_grad_norm``;
            computed without it.

    Returns:
        What the closure returned, else None. ``.grad`` is as before.
    """
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    groups = optimizer.param_groups
    scale = check_scale("scale", scale)
    grads_by_group = _by_group("grads", grads, groups)
    outputs_by_group = _by_group("output_params", output_params, groups)
    norms: Sequence[Any] = [None] * len(groups) if grad_norms is None else grad_norms
    if len(norms) != len(groups):
        raise AmpValueError(f"grad_norms has {len(norms)} norms, the optimizer has {len(groups)} groups")
    before: dict[Tensor, Tensor | None] = {}
    try:
        for group, given, norm in zip(groups, grads_by_group, norms, strict=True):
            pairs = [(p, p.grad if g is None else g) for p, g in zip(group["params"], given, strict=True)]
            found = [(p, g) for p, g in pairs if g is not None]
            sources = [g for _, g in found]
            factor = _factor(scale, group.get("max_grad_norm", 0.0), norm, sources)
            if factor == 1.0 and grads is None:
                continue
            wide = [torch.empty_like(p) for p, _ in found]
            foreach.scale(sources, wide, FoundInf(), factor)
            for (p, _), unscaled in zip(found, wide, strict=True):
                before[p], p.grad = p.grad, unscaled
        run()
    finally:
        for p, grad in before.items():
            p.grad = grad
    for group, outputs in zip(groups, outputs_by_group, strict=True):
        written = [
            (p.detach(), out.detach()) for p, out in zip(group["params"], outputs, strict=True) if out is not None
        ]
        foreach.scale([p for p, _ in written], [out for _, out in written], FoundInf(), 1.0)
    return loss
