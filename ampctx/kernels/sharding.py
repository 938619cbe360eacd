"""DTensors: tensors spread over the ranks of a device mesh by fully_shard or tensor parallelism.

The ops work on this rank's part. The caller joins flags and norms over the mesh with collectives, in which every rank
must take part.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ampctx._errors import AmpValueError
from ampctx.distributed import all_reduce
from ampctx.kernels.each import grad_of


def _dtensor() -> type | None:
    """The DTensor class if the program imported it. Importing it here would be slow, and before that none can exist."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def is_sharded(t: Tensor) -> bool:
    """Whether a tensor is a DTensor, a replicated one too."""
    kind = _dtensor()
    return kind is not None and isinstance(t, kind)


def is_fully_sharded(module: torch.nn.Module) -> bool:
    """Whether ``torch.distributed.fsdp.fully_shard`` was applied to the module itself."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return kind is not None and isinstance(module, kind)


def steps_a_partition(optimizer: Any) -> bool:
    """Whether ``optimizer`` is a ZeroRedundancyOptimizer, which steps only a part of its parameters on each rank."""
    kind = getattr(sys.modules.get("torch.distributed.optim"), "ZeroRedundancyOptimizer", None)
    return kind is not None and isinstance(optimizer, kind)


def any_sharded(tensors: Iterable[Tensor]) -> bool:
    kind = _dtensor()
    return kind is not None and any(issubclass(found, kind) for found in set(map(type, tensors)))


@torch.no_grad()
def _part(t: Any) -> Tensor:
    part = t.to_local()
    # On some paths torch returns a pending collective; ``wait`` gives the tensor.
    return part.wait() if hasattr(part, "wait") else part


def local(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Replaces each DTensor by this rank's part, which shares its memory."""
    return [_part(t) if is_sharded(t) else t for t in tensors] if any_sharded(tensors) else tensors


def wrote(tensors: Sequence[Tensor]) -> None:
    """Tells autograd that DTensors changed, after a write to their parts."""
    if any_sharded(tensors):
        torch.autograd.graph.increment_version([t for t in tensors if is_sharded(t)])


def place_grads(params: Sequence[Tensor]) -> None:
    """Redistributes each ``p.grad`` to the placements of ``p``, as torch's optimizers do. Completes pending sums."""
    if not any_sharded(params):
        return
    kind: Any = _dtensor()
    for p, grad in zip(params, map(grad_of, params), strict=True):
        if isinstance(p, kind) and isinstance(grad, kind) and grad.placements != p.placements:
            with torch.no_grad():
                p.grad = grad.redistribute(p.device_mesh, p.placements)


def is_split(t: Tensor) -> bool:
    """Whether this rank may hold only some of the elements."""
    kind: Any = _dtensor()
    return kind is not None and isinstance(t, kind) and not all(p.is_replicate() for p in t.placements)


def groups_of(tensors: Iterable[Tensor]) -> list[Any]:
    """The process groups of the DTensors' meshes, one per mesh dimension with several ranks."""
    tensors = list(tensors)
    if not any_sharded(tensors):
        return []
    meshes = dict.fromkeys(t.device_mesh for t in tensors if is_sharded(t))  # type: ignore[attr-defined]
    return list(dict.fromkeys(group for mesh in meshes for group in mesh.get_all_groups() if group.size() > 1))


def by_layout(tensors: Iterable[Tensor]) -> dict[Any, list[Tensor]]:
    """Groups tensors by mesh and placements. The key of plain tensors is None."""
    found: dict[Any, list[Tensor]] = {}
    for t in tensors:
        key = (t.device_mesh, t.placements) if is_sharded(t) else None  # type: ignore[attr-defined]
        found.setdefault(key, []).append(t)
    return found


def norm_over_ranks(norm: Tensor, like: Any, order: float) -> Tensor:
    """Joins the norms of the ranks' parts; ``like`` is one of the tensors.

    One all_reduce per mesh dimension along which the tensors are split. Every rank of the mesh must take part, with
    a norm of the same dtype.

    Raises:
        AmpValueError: the tensors are split and ``order`` is not above 0. AmpRankError: a collective failed.
    """
    split = (
        []
        if not is_sharded(like)
        else [i for i, placement in enumerate(like.placements) if not placement.is_replicate()]
    )
    if not split:
        return norm
    if not order > 0:
        raise AmpValueError(f"norm_type is {order}, expected a number above 0 or 'inf' for the gradients of DTensors")
    largest = order == math.inf
    op = torch.distributed.ReduceOp.MAX if largest else torch.distributed.ReduceOp.SUM
    joined = norm.clone() if largest else norm**order
    for i in split:
        all_reduce(joined, op, like.device_mesh.get_group(i), "clip_grad_norm_", "the norm of its part")
    return joined if largest else joined ** (1 / order)


def values_of(grad: Tensor) -> Tensor:
    """The stored elements: of a sparse gradient with duplicates summed, of a DTensor those on this rank."""
    grad = local([grad.detach()])[0]
    return grad.coalesce().values() if grad.layout == torch.sparse_coo else grad
