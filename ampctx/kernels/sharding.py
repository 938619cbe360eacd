"""DTensors: tensors whose elements lie on the ranks of a device mesh, as fully_shard and tensor parallelism leave them.

The ops work on the part that lies on this rank. Flags and norms of parts are joined over the mesh by those who need
them; every rank takes part then, as in each operation on a DTensor.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ampctx._errors import AmpValueError
from ampctx.kernels.each import grad_of


def _dtensor() -> type | None:
    """The class, where a program has imported it: before that there are none, and to import it takes long."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def is_sharded(t: Tensor) -> bool:
    """Whether a tensor is a DTensor, one that is the same on all ranks included."""
    kind = _dtensor()
    return kind is not None and isinstance(t, kind)


def is_fully_sharded(module: torch.nn.Module) -> bool:
    """Whether ``torch.distributed.fsdp.fully_shard`` was applied to the module itself."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return kind is not None and isinstance(module, kind)


def steps_a_partition(optimizer: Any) -> bool:
    """Whether it is a ZeroRedundancyOptimizer, whose rank steps those of its parameters that it was built with."""
    kind = getattr(sys.modules.get("torch.distributed.optim"), "ZeroRedundancyOptimizer", None)
    return kind is not None and isinstance(optimizer, kind)


def any_sharded(tensors: Iterable[Tensor]) -> bool:
    kind = _dtensor()
    return kind is not None and any(issubclass(found, kind) for found in set(map(type, tensors)))


@torch.no_grad()
def _part(t: Any) -> Tensor:
    part = t.to_local()
    # The result of a collective that is under way, on some paths of torch: ``wait`` gives the tensor itself.
    return part.wait() if hasattr(part, "wait") else part


def local(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The tensors, with the part that lies on this rank in the place of each DTensor; the memory is the same."""
    return [_part(t) if is_sharded(t) else t for t in tensors] if any_sharded(tensors) else tensors


def wrote(tensors: Sequence[Tensor]) -> None:
    """Tells autograd that DTensors changed whose parts were written to."""
    if any_sharded(tensors):
        torch.autograd.graph.increment_version([t for t in tensors if is_sharded(t)])


def place_grads(params: Sequence[Tensor]) -> None:
    """Lays out each gradient as its parameter, ``p.grad`` replaced: sums that are still to be made over the ranks are
    made, as an optimizer of torch would have it."""
    if not any_sharded(params):
        return
    kind: Any = _dtensor()
    for p, grad in zip(params, map(grad_of, params), strict=True):
        if isinstance(p, kind) and isinstance(grad, kind) and grad.placements != p.placements:
            with torch.no_grad():
                p.grad = grad.redistribute(p.device_mesh, p.placements)


def is_split(t: Tensor) -> bool:
    """Whether this rank may have a part of the elements only."""
    kind: Any = _dtensor()
    return kind is not None and isinstance(t, kind) and not all(p.is_replicate() for p in t.placements)


def groups_of(tensors: Iterable[Tensor]) -> list[Any]:
    """The process groups of the meshes that DTensors among these are spread over, one for each dimension that is."""
    tensors = list(tensors)
    if not any_sharded(tensors):
        return []
    meshes = dict.fromkeys(t.device_mesh for t in tensors if is_sharded(t))  # type: ignore[attr-defined]
    return list(dict.fromkeys(group for mesh in meshes for group in mesh.get_all_groups() if group.size() > 1))


def by_layout(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Tensors that lie on the same ranks in the same manner together; those that are no DTensors first."""
    found: dict[Any, list[Tensor]] = {None: []}
    for t in tensors:
        key = (t.device_mesh, t.placements) if is_sharded(t) else None  # type: ignore[attr-defined]
        found.setdefault(key, []).append(t)
    return [group for group in found.values() if group]


def norm_over_ranks(norm: Tensor, like: Any, order: float) -> Tensor:
    """The norm of what lies on all ranks as ``like`` does, from that of this rank's part. An all_reduce for each
    dimension of the mesh along which tensors are split.

    Raises:
        AmpValueError: an order that is not above 0, where a tensor is split.
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
        torch.distributed.all_reduce(joined, op, like.device_mesh.get_group(i))
    return joined if largest else joined ** (1 / order)


def values_of(grad: Tensor) -> Tensor:
    """The elements that a gradient stores: of a sparse one, duplicates summed; of a DTensor, those on this rank."""
    grad = local([grad.detach()])[0]
    return grad.coalesce().values() if grad.layout == torch.sparse_coo else grad
