"""The orthogonalisation of Muon: Newton-Schulz iterations in torch, on stacks of matrices of one shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ampctx._errors import AmpTypeError, AmpValueError
from ampctx.casts.arguments import autocast_off
from ampctx.kernels.reference import KERNEL_DTYPES
from ampctx.kernels.sharding import is_sharded

# The bf16 elements of a stack: 64 MiB. Larger ones would only take more memory.
MOST_ELEMENTS = 2**25

Orthogonalize = Callable[[Tensor], Tensor]


def newton_schulz(stack: Tensor, coefficients: Sequence[float], steps: int, eps: float) -> Tensor:
    """Orthogonalises each matrix of a bf16 stack (k, m, n): U V' of its U S V', with singular values near 1.

    The quintic iteration of Jordan et al. (2024), as in torch.optim.Muon: x / max(norm, eps), divided in fp32, then
    ``steps`` times ``a x + (b A + c A A) x`` with A = x x' in bf16. Tall matrices are transposed. No host sync.
    """
    a, b, c = coefficients
    is_tall = stack.shape[1] > stack.shape[2]
    x = stack.mT if is_tall else stack
    norms = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.float32)
    x = (x / norms.clamp(min=eps)).to(stack.dtype)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def stacks(matrices: Iterable[tuple[Any, int]]) -> list[list[int]]:
    """Sorts (kind, number of elements) into stacks: lists of places of one kind, in order, with at most
    ``MOST_ELEMENTS``, or one place with more."""
    found: list[list[int]] = []
    unfilled: dict[Any, tuple[list[int], int]] = {}
    for i, (kind, elements) in enumerate(matrices):
        stack, room = unfilled.get(kind, ([], 0))
        if not stack or elements > room:
            stack, room = [], MOST_ELEMENTS
            found.append(stack)
        stack.append(i)
        unfilled[kind] = stack, room - elements
    return found


def orthogonalized(directions: Sequence[Tensor], function: Orthogonalize) -> list[Tensor]:
    """``function`` of directions (m, n) or (experts, m, n), all of one m and n, in stacks of at most
    ``MOST_ELEMENTS``.

    Raises:
        AmpTypeError, AmpValueError: the function returns no tensor of its argument's shape and device.
    """
    # O1 and O4 leave autocast on between forward passes.
    with autocast_off():
        stack = torch.cat([u.reshape(-1, *u.shape[-2:]) for u in directions])
        if not stack.numel():
            return list(directions)
        parts = stack.split(max(1, MOST_ELEMENTS // stack[0].numel()))
        results = [_checked(function(part), part) for part in parts]
        result = results[0] if len(results) == 1 else torch.cat(results)
    counts = [math.prod(u.shape[:-2]) for u in directions]
    return [o.reshape(u.shape) for o, u in zip(result.split(counts), directions, strict=True)]


def _checked(result: Any, part: Tensor) -> Tensor:
    if not isinstance(result, Tensor):
        raise AmpTypeError(f"orthogonalize returned a {type(result).__name__}, expected a tensor")
    if result.shape != part.shape or result.device != part.device or result.dtype not in KERNEL_DTYPES:
        raise AmpValueError(
            f"orthogonalize returned shape {tuple(result.shape)} of {result.dtype} on {result.device}, expected a "
            f"floating tensor of shape {tuple(part.shape)} on {part.device}. Momenta have advanced: load a checkpoint."
        )
    return result


def adjustment(adjust_lr_fn: str | None, shape: Sequence[int]) -> float:
    """The factor for the lr of matrices with ``shape[-2:]``, as in torch.optim.Muon: Jordan et al. (2024), or with
    "match_rms_adamw" Liu et al. (2025)."""
    rows, columns = shape[-2:]
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / max(columns, 1)))


def _sharding(p: Any) -> list[Any]:
    """The placements that split a DTensor over several ranks."""
    if not is_sharded(p):
        return []
    sizes = [group.size() for group in p.device_mesh.get_all_groups()]
    return [each for each, size in zip(p.placements, sizes, strict=True) if size > 1 and not each.is_replicate()]


def has_split_matrices(p: Tensor) -> bool:
    """Whether ranks hold parts of the matrices. ``fully_shard`` splits a stack of experts between its matrices."""
    return p.dim() == 2 and bool(_sharding(p))


def check_matrix(name: str, p: Tensor) -> None:
    """Raises AmpValueError for a parameter that Muon cannot step, by its name."""
    if p.dim() not in (2, 3):
        raise AmpValueError(
            f"FusedMuon orthogonalises matrices, and {name} has shape {tuple(p.shape)}, expected (rows, columns) or "
            "(experts, rows, columns). Put it into a group with use_muon=False, which AdamW steps."
        )
    sharding = _sharding(p)
    if len(sharding) > 1 or any(not placement.is_shard(0) for placement in sharding):
        raise AmpValueError(
            f"FusedMuon steps DTensors that fully_shard splits along dimension 0, and {name} has placements "
            f"{tuple(p.placements)}. Put tensor-parallel parameters into a group with use_muon=False, "  # type: ignore[attr-defined]
            "which AdamW steps."
        )
