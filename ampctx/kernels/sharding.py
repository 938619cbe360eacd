"""DTensors: tensors spread over the ranks of a device mesh by fully_shard or tensor parallelism.

The ops work on this rank's part. The caller joins flags and norms over the mesh with collectives, in which every rank
must take part.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ampctx._collectives import named_collective, reduced_over
from ampctx.kernels.tensor_loops import grad_of


def _loaded(module: str, name: str) -> Any:
    """A class of torch.distributed if the program imported it. Importing it here would be slow, and before that none of
    its objects can exist: then (), of which nothing is an instance."""
    return getattr(sys.modules.get(f"torch.distributed.{module}"), name, ())


def dtensor() -> Any:
    """The class, or ()."""
    return _loaded("tensor", "DTensor")


def is_sharded(t: Tensor) -> bool:
    """Whether a tensor is a DTensor, a replicated one too."""
    return isinstance(t, dtensor())


def is_fully_sharded(module: torch.nn.Module) -> bool:
    """Whether ``torch.distributed.fsdp.fully_shard`` was applied to the module itself."""
    return isinstance(module, _loaded("fsdp", "FSDPModule"))


def reshard_units(model: torch.nn.Module) -> None:
    """Puts the parts of parameters back into a ``fully_shard`` model. No collective. torch leaves the outermost unit
    gathered after a forward without backward, and the model then has other parameters than the optimizer."""
    for module in model.modules():
        if is_fully_sharded(module):
            module.reshard()  # type: ignore[operator]


def steps_a_partition(optimizer: Any) -> bool:
    """Whether ``optimizer`` is a ZeroRedundancyOptimizer, which steps only a part of its parameters on each rank."""
    return isinstance(optimizer, _loaded("optim", "ZeroRedundancyOptimizer"))


def any_sharded(tensors: Iterable[Tensor]) -> bool:
    kind = dtensor()
    return bool(kind) and any(map(issubclass, set(map(type, tensors)), repeat(kind)))


def _part(t: Any) -> Tensor:
    # Private: to_local() takes ten times as long, and makes a new view of a parameter at each call.
    part: Any = t._local_tensor
    if type(part) is not Tensor and hasattr(part, "wait"):  # a collective that has yet to arrive
        with torch.no_grad():
            return part.wait()
    return part


def local(tensors: Sequence[Any]) -> Sequence[Any]:
    """Replaces each DTensor by this rank's part, which shares its memory."""
    if not any_sharded(tensors):
        return tensors
    kind = dtensor()
    return [_part(t) if isinstance(t, kind) else t for t in tensors]


def wrote(tensors: Sequence[Tensor]) -> None:
    """Tells autograd that DTensors changed, after a write to their parts."""
    if any_sharded(tensors):
        kind = dtensor()
        alike = set(map(type, tensors)) == {kind}
        torch.autograd.graph.increment_version(tensors if alike else [t for t in tensors if isinstance(t, kind)])


def is_split(t: Any) -> bool:
    """Whether this rank may hold only some of the elements."""
    return is_sharded(t) and not all(p.is_replicate() for p in t.placements)


def part_number(t: Any) -> int:
    """The number of this rank's part of a DTensor: 0 for whole tensors. Ranks that hold the same part agree."""
    number = 0
    if is_split(t) and (places := t.device_mesh.get_coordinate()) is not None:
        for size, index, placement in zip(t.device_mesh.shape, places, t.placements, strict=True):
            if not placement.is_replicate():
                number = number * size + index
    return number


def is_row_sharded(t: Any, block: int) -> bool:
    """Whether a DTensor is sharded by rows only, if at all, and its rows are multiples of ``block`` in one piece."""
    if not is_sharded(t) or t.dim() < 2 or t.shape[0] == 0:
        return False
    row = t.shape[1:].numel()
    shard: Any = sys.modules["torch.distributed.tensor"].Shard
    # Exactly this class: those of interleaved rows derive from it.
    by_rows = all(p.is_replicate() or (type(p) is shard and p.dim == 0) for p in t.placements)
    return by_rows and row > 0 and row % block == 0 and (t.shape[0] == 1 or t.stride(0) == row)


def around(part: Tensor, like: Any) -> Any:
    """``part``, on any device, as this rank's part of a DTensor laid out as ``like``; for a plain ``like`` itself. The
    mesh stays that of the device, as where torch's CPUOffloadPolicy keeps parameters on the host."""
    # Private: ``from_local`` would move the part to the device of the mesh.
    return dtensor()(part, like._spec, requires_grad=False) if is_sharded(like) else part


def like_rows_of(t: Any, columns: int, dtype: torch.dtype) -> Tensor:
    """Zeros of shape (rows of ``t``, columns), sharded as ``t`` is, which is sharded by rows."""
    part = _part(t)
    zeros = torch.zeros(part.shape[0], columns, dtype=dtype, device=part.device)
    how = {"shape": torch.Size((t.shape[0], columns)), "stride": (columns, 1)}
    return around(zeros, dtensor().from_local(zeros.to("meta"), t.device_mesh, t.placements, run_check=False, **how))


def whole(t: Any) -> Any:
    """The whole of a DTensor, on every rank: a collective. A plain tensor itself."""
    if not is_sharded(t):
        return t
    # The backend of a mesh has no parts on another device.
    at = t.device if t.device.type == t.device_mesh.device_type else t.device_mesh.device_type
    return around(_part(t).to(at), t).full_tensor().to(t.device)


def laid_out_as(value: Any, like: Any) -> Tensor:
    """``value`` as a DTensor laid out as ``like`` on its device, or as a plain tensor. A collective if it is a DTensor
    laid out otherwise."""
    if not is_sharded(like):
        return whole(value)
    if is_sharded(value) and (value.device_mesh, value.placements) == (like.device_mesh, like.placements):
        return value
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh, places, found = like.device_mesh, like.placements, whole(value)
    is_simple = all(p.is_replicate() or type(p) is Shard for p in places)
    if like.device.type == mesh.device_type or not is_simple:
        # None: each rank takes its part of its own tensor.
        part = _part(distribute_tensor(found.to(mesh.device_type), mesh, places, src_data_rank=None)).to(like.device)
    else:  # without a way over the device
        part = found.to(like.device)
        for size, i, place in zip(mesh.shape, mesh.get_coordinate(), places, strict=True):
            if not place.is_replicate():
                chunks = part.chunk(size, place.dim)
                part = chunks[i] if i < len(chunks) else part.narrow(place.dim, 0, 0)
    return around(part, like)


class Grid:
    """The ranks over which some DTensors are spread: those of the largest of their meshes.

    ``groups``: the process groups to reduce over, one after the other. The default group alone if the mesh has all its
    ranks; else those of each dimension, as torch has no public way to make one group of several dimensions.
    """

    def __init__(self, mesh: Any) -> None:
        self.dims = self.groups = _dims_of(mesh)
        config, world = torch.distributed.get_backend_config, torch.distributed.group.WORLD
        is_whole = len(self.dims) > 1 and world is not None and mesh.size() == world.size()
        if is_whole and set(map(config, self.dims)) == {config(world)}:
            self.groups = [world]

    def holds(self, mesh: Any) -> bool:
        """Whether each dimension of a mesh is one of the grid."""
        return set(_dims_of(mesh)) <= set(self.dims)

    def counts(self, t: Any) -> bool:
        """Whether this rank counts its part of a DTensor: along dimensions that replicate it, the first rank does."""
        split = {t.device_mesh.get_group(i) for i, each in enumerate(t.placements) if not each.is_replicate()}
        return all(group.rank() == 0 for group in self.dims if group not in split)

    def reduce(self, t: Tensor, op: Any, call: str, has: str) -> Tensor:
        """Reduces ``t`` in place over all ranks of the grid, which must all take part. ``call``, ``has``: for messages,
        see ``ampctx.distributed.all_reduce``."""
        return reduced_over(t, op, self.groups, call, has)


def _dims_of(mesh: Any) -> list[Any]:
    return [group for group in mesh.get_all_groups() if group.size() > 1]


def grids_of(tensors: Iterable[Tensor]) -> dict[Any, Grid]:
    """The grid of each mesh of the DTensors. Meshes of one rank have none."""
    meshes = dict.fromkeys(t.device_mesh for t in tensors if is_sharded(t))  # type: ignore[attr-defined]
    found: dict[Any, Grid] = {}
    grids: list[Grid] = []
    for mesh in sorted(meshes, key=lambda mesh: -len(_dims_of(mesh))):
        if not _dims_of(mesh):
            continue
        if (grid := next((grid for grid in grids if grid.holds(mesh)), None)) is None:
            grids.append(grid := Grid(mesh))
        found[mesh] = grid
    return found


def groups_of(tensors: Iterable[Tensor]) -> list[Any]:
    """The process groups over which flags of the DTensors are joined."""
    tensors = list(tensors)
    if not any_sharded(tensors):
        return []
    grids = (spread.grid for spread in spreads_of(tensors) if spread.grid is not None)
    return list(dict.fromkeys(group for grid in grids for group in grid.groups))


def by_layout(tensors: Iterable[Tensor]) -> dict[Any, list[int]]:
    """The places of tensors of each mesh and placements. The key of plain tensors is None."""
    found: dict[Any, list[int]] = {}
    for i, t in enumerate(tensors):
        key = (t.device_mesh, t.placements) if is_sharded(t) else None  # type: ignore[attr-defined]
        found.setdefault(key, []).append(i)
    return found


class Spread(NamedTuple):
    """The tensors of a list that one grid has, by their places; None: each rank has them whole. ``joins``: ranks have
    different parts of some, and each counts those at ``counted``."""

    grid: Grid | None
    joins: bool
    places: list[int]
    counted: list[int]


# By the ids of the layouts of a list, which the entry keeps alive.
_SPREADS: dict[tuple[int, ...], tuple[list[Any], list[Spread]]] = {}
_MOST_SPREADS = 64


def spreads_of(tensors: Sequence[Any]) -> list[Spread]:
    """How parameters are spread over the ranks. Kept for lists of the same layouts, as to compare meshes and placements
    takes longer than a norm."""
    layouts = layouts_of(tensors)
    key = tuple(map(id, layouts))
    if key in _SPREADS:
        return _SPREADS[key][1]
    alike = by_layout(tensors)
    grids = grids_of(tensors[i] for i, *_ in alike.values())
    of_grids: dict[Grid | None, list[list[int]]] = {}
    for layout, places in alike.items():
        of_grids.setdefault(None if layout is None else grids.get(layout[0]), []).append(places)
    spreads = []
    for grid, kinds in of_grids.items():
        joins = grid is not None and any(is_split(tensors[i]) for i, *_ in kinds)
        counted = [kind for kind in kinds if grid is None or not joins or grid.counts(tensors[kind[0]])]
        spreads.append(Spread(grid, joins, list(chain(*kinds)), list(chain(*counted))))
    for oldest in list(_SPREADS)[: 1 - _MOST_SPREADS]:
        _SPREADS.pop(oldest, None)
    _SPREADS[key] = layouts, spreads
    return spreads


def layouts_of(tensors: Iterable[Any]) -> list[Any]:
    """The layout of each over the ranks, None of a plain tensor."""
    kind = dtensor()
    # Private: two public properties tell the same in six times the time.
    return [t._spec if isinstance(t, kind) else None for t in tensors]


# The placements and dtypes of gradients that were sums still to be made, by parameter.
_ARRIVES_AS: Any = WeakIdKeyDictionary()


def may_arrive_as_sums(params: Iterable[Tensor]) -> bool:
    """Whether gradients of some were sums still to be made. Then each rank takes part, with or without a gradient."""
    return len(_ARRIVES_AS) > 0 and any(p in _ARRIVES_AS for p in params)


def are_placed(params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> bool:
    """Whether ``grads`` are laid out as their parameters, and none was a sum still to be made."""
    return layouts_of(grads) == layouts_of(params) and not may_arrive_as_sums(params)  # mostly the same layouts


@torch.no_grad()
def place_grads(params: Sequence[Tensor]) -> None:
    """Redistributes each ``p.grad`` to the placements of ``p``, as torch's optimizers do. Completes pending sums.

    A rank without a gradient takes part with zeros if the parameter had a pending sum before, and gets the sum if
    another rank has one: a host sync on that rank. AmpRankError: a rank has never had such a gradient.
    """
    if not any_sharded(params) or are_placed(params, grads := list(map(grad_of, params))):
        return
    kind = dtensor()
    pending: list[tuple[Any, Any]] = []
    for p, grad in zip(params, grads, strict=True):
        if not isinstance(p, kind):
            continue
        if isinstance(grad, kind) and grad.placements != p.placements:
            if _dims_of(p.device_mesh) and any(placement.is_partial() for placement in grad.placements):
                pending.append((p, grad))
                _ARRIVES_AS[p] = grad.placements, grad.dtype
            else:
                p.grad = grad.redistribute(p.device_mesh, p.placements)
        elif grad is None and p in _ARRIVES_AS:
            pending.append((p, None))
    grids = grids_of([p for p, _ in pending])
    for grid in dict.fromkeys(grids.values()):
        _add_up([(p, grad) for p, grad in pending if grids.get(p.device_mesh) is grid], grid)


def _add_up(pending: list[tuple[Any, Any]], grid: Grid) -> None:
    """Makes the pending sums of (parameter, gradient or None). Ranks without a gradient learn whether others have
    one."""
    call, has = "Adding up the gradients of DTensors", f"{len(pending)} of them"
    have_one = torch.ones(len(pending), dtype=torch.float32, device=_part(pending[0][0]).device)
    sums = []
    for i, (p, grad) in enumerate(pending):
        if grad is None:
            have_one[i].zero_()
        with named_collective(call, grid.groups[0], has):
            here = _zeros_like(p, *_ARRIVES_AS[p]) if grad is None else grad
            sums.append(here.redistribute(p.device_mesh, p.placements))
            _part(sums[-1])
    grid.reduce(have_one, torch.distributed.ReduceOp.SUM, call, has)
    some_are_missing = any(grad is None for _, grad in pending)
    counts = have_one.tolist() if some_are_missing else [1.0] * len(pending)
    for (p, _), total, count in zip(pending, sums, counts, strict=True):
        if count:
            p.grad = total


def _zeros_like(p: Any, placements: Sequence[Any], dtype: torch.dtype) -> Any:
    """A DTensor of zeros for ``p`` that is a pending sum where ``placements`` are."""
    tensor = sys.modules["torch.distributed.tensor"]
    whole = [tensor.Replicate() if placement.is_partial() else placement for placement in placements]
    part = tensor.zeros(p.shape, dtype=dtype, device_mesh=p.device_mesh, placements=whole).to_local()
    return tensor.DTensor.from_local(part, p.device_mesh, placements, run_check=False, shape=p.shape, stride=p.stride())


def values_of(grad: Tensor) -> Tensor:
    """The stored elements: of a sparse gradient with duplicates summed, of a DTensor those on this rank."""
    grad = local([grad.detach()])[0]
    return grad.coalesce().values() if grad.layout == torch.sparse_coo else grad
