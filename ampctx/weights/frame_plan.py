"""The plan of the end of a frame: the op calls that unscaled and checked the gradients of the frame before.

It serves one open block without gradients from before, on one device. Anything else is plain code's: ``Frames.leave``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ampctx.kernels import ops
from ampctx.kernels.foreach import Factor, FoundInf, PerDevice
from ampctx.kernels.ops import OpCall
from ampctx.kernels.plan import Column, Plan, PlannedCall, make_plan
from ampctx.kernels.sharding import local, may_arrive_as_sums
from ampctx.kernels.tensor_loops import all_there, clear_grads, dtype_of, same_items, store_grads, stored_grad
from ampctx.weights.masters import MasterParams
from ampctx.weights.pending import Pending, fills_its_storage, new_grad

_SCALE, _NORM = "multi_tensor_scale", "multi_tensor_unscale_l2norm"
_UPDATE = "_and_update"


def frame_plan(
    masters: MasterParams, calls: list[OpCall], grads: list[Tensor | None], factor: Factor, made: Pending | None
) -> FramePlan | None:
    """The plan of ``calls``, made on the ``grads`` of the leaves, in their order. ``made``: the pending gradients that
    came of them."""
    leaves = masters.params_with_master if factor == 1.0 else masters.leaves
    if masters.has_sharded and (factor == 1.0 or may_arrive_as_sums(leaves)):
        return None
    there = [(p, grad) for p, grad in zip(leaves, grads, strict=False) if grad is not None]
    without = [p for p, grad in zip(leaves, grads, strict=False) if grad is None]
    # By the gradient, or this rank's part of it.
    leaf_of = {id(part): pair for part, pair in zip(local([grad for _, grad in there]), there, strict=True)}
    if len(leaf_of) < len(there):
        return None  # parameters share a gradient, and the next block may give each its own
    planned: list[PlannedCall] = []
    givers: list[Tensor] = []
    takers: Sequence[Tensor] = [] if made is None else made.masters
    view, device = None, calls[0].lists[0][0].device
    for op, (src, *dst), _ in calls:
        ids, expected = list(map(id, src)), _SCALE if made is None or planned else _NORM
        if op.removesuffix(_UPDATE) != expected or not leaf_of.keys() >= set(ids) or src[0].device != device:
            return None  # copies of gradients, or sums
        params, whole = map(list, zip(*map(leaf_of.pop, ids), strict=True))
        columns: list[Column] = [(params, whole)] * (1 + len(dst))
        if dst and not same_items(src, *dst):
            givers, takers, columns[1] = params, [master for _, master in masters.pairs_of(params)], None
            view = next((i for i, grad in enumerate(whole) if not fills_its_storage(grad)), None)
            is_known = view is not None or not masters.takes_pending  # why these gradients did not wait
            if planned or not is_known or not same_items(list(map(stored_grad, takers)), *dst):
                return None
        planned.append(PlannedCall(op, columns, (1,) if dst and givers is not params else ()))
    plan = None if leaf_of else make_plan([], planned, idle=without)
    if plan is None:
        return None
    kind = op.endswith(_UPDATE), factor == 1.0 and list(map(dtype_of, masters.params_without_master))
    return FramePlan(plan, len(calls), masters.leaves, device, kind, givers, takers, view)


@dataclass(eq=False)
class FramePlan:
    """Attributes:
    leaves: the list of leaves that it is for.
    kind: whether the last call updates the scale; and, if the factor is 1, so that nobody looks at the gradients of
        parameters without master, the dtypes of these parameters.
    givers, takers: the parameters and masters of the first call. Without givers the gradients are pending.
    view: the place of a gradient in memory that other code may write to, so that it cannot be pending.
    """

    plan: Plan
    calls: int
    leaves: list[Tensor]
    device: torch.device
    kind: tuple[bool, bool | list[torch.dtype]]
    givers: list[Tensor]
    takers: Sequence[Tensor]
    view: int | None

    def leave(self, masters: MasterParams, factor: Factor, found_inf: FoundInf) -> bool:
        """Ends the frame: whether it has. Where it has not, nothing has changed. No host sync."""
        update, device = found_inf.update, self.device
        kind = update is not None, factor == 1.0 and list(map(dtype_of, masters.params_without_master))
        if kind != self.kind or ops.is_watched():
            return False
        flag, inv_scale = found_inf.on(device), factor.on(device) if isinstance(factor, PerDevice) else factor
        arguments: list[tuple[Any, ...]] = [(flag, inv_scale)] * self.calls
        arguments[-1] += tuple(update or ())
        new: list[Tensor] = []
        if self.givers:
            given = list(map(stored_grad, self.givers))
            if not all_there(given) or (self.view is not None and fills_its_storage(given[self.view])):
                return False
            arguments[0] = (new := list(map(new_grad, given)), *arguments[0])
        elif self.takers:
            each, ends = torch.empty(len(self.takers), dtype=torch.float32, device=device), arguments[0][2:]
            new = [torch.empty_like(flag), each, *([torch.empty_like(flag)] if ends else [])]
            arguments[0] = (flag, inv_scale, True, *ends, *new)
        grads = self.plan.run([], arguments, may_share=False, takes=not self.givers)
        if grads is None:
            return False
        if update is not None:
            found_inf.update, found_inf.is_updated = None, True
            ops.wrote(update[:3])
        if self.givers:
            clear_grads(self.givers)
            store_grads(self.takers, new)
            masters.place.has_grads = True
        elif self.takers:
            total, each, *again = new
            made = Pending(self.takers, masters.place, grads[0], factor, total, [(range(len(each)), each)], *again)
            masters.place.pending = masters.place.checked = made
        return True
