"""The plan of the end of a frame: the op calls that unscaled and checked the gradients of the frame before.

It serves one open block without gradients from before, on one device. Anything else is plain code's: ``Frames.leave``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ampctx.kernels import ops
from ampctx.kernels.foreach import Factor, FoundInf, PerDevice
from ampctx.kernels.ops import OpCall
from ampctx.kernels.plan import Plan, PlannedCall, make_plan
from ampctx.kernels.sharding import local, may_arrive_as_sums
from ampctx.kernels.tensor_loops import same_items
from ampctx.weights.masters import MasterParams
from ampctx.weights.pending import Pending

_SCALE, _NORM = "multi_tensor_scale", "multi_tensor_unscale_l2norm"
_UPDATE = "_and_update"


def frame_plan(
    masters: MasterParams, calls: list[OpCall], grads: list[Tensor | None], made: Pending | None
) -> FramePlan | None:
    """The plan of ``calls``, made on the ``grads`` of the leaves, in their order. ``made``: the pending gradients that
    came of them."""
    if masters.has_sharded and may_arrive_as_sums(masters.leaves):
        return None
    there = [(p, grad) for p, grad in zip(masters.leaves, grads, strict=True) if grad is not None]
    # By the gradient, or this rank's part of it.
    leaf_of = {id(part): pair for part, pair in zip(local([grad for _, grad in there]), there, strict=True)}
    if len(leaf_of) < len(there):
        return None  # parameters share a gradient, and the next block may give each its own
    planned = []
    for call in calls:
        tensors, is_norm = list(call.lists[0]), call.op.startswith(_NORM)
        in_place = call.op.removesuffix(_UPDATE) == _SCALE and same_items(*call.lists)
        if not (is_norm or in_place) or not leaf_of.keys() >= set(map(id, tensors)):
            return None  # copies of gradients, or sums
        params, whole = map(list, zip(*(leaf_of[id(t)] for t in tensors), strict=True))
        column = params, whole
        planned.append(PlannedCall(call.op, [column] if is_norm else [column, column], () if is_norm else (1,)))
    are_norms = [call.op.startswith(_NORM) for call in calls]
    taken = sum(len(call.lists[0]) for call in calls)
    if taken != len(leaf_of) or are_norms != [made is not None] + [False] * (len(calls) - 1):
        return None
    without = [p for p, grad in zip(masters.leaves, grads, strict=True) if grad is None]
    plan = make_plan([], planned, idle=without)
    names, device = [call.op for call in calls], calls[0].lists[0][0].device
    return None if plan is None else FramePlan(plan, masters, names, device, made)


class FramePlan:
    """Attributes:
    leaves: the list of leaves that it is for.
    """

    def __init__(
        self, plan: Plan, masters: MasterParams, names: list[str], device: torch.device, made: Pending | None
    ) -> None:
        self._plan, self._ops, self._device, self.leaves = plan, names, device, masters.leaves
        self._updates = names[-1].endswith(_UPDATE)
        self._place = masters.place
        self._masters = None if made is None else made.masters

    def leave(self, factor: Factor, found_inf: FoundInf) -> tuple[bool, Pending | None]:
        """Ends the frame: whether it has, and the pending gradients. Where it has not, nothing has changed. No host
        sync."""
        update, device = found_inf.update, self._device
        if (update is not None) is not self._updates or ops.is_watched():
            return False, None
        flag, inv_scale = found_inf.on(device), factor.on(device) if isinstance(factor, PerDevice) else factor
        norms: list[Tensor] = []
        arguments: list[tuple[Any, ...]] = []
        for op in self._ops:
            ends = update if op.endswith(_UPDATE) and update is not None else ()
            if op.startswith(_NORM):
                each = torch.empty(len(self._masters or ()), dtype=torch.float32, device=device)
                norms = [torch.empty_like(flag), each, *([torch.empty_like(flag)] if ends else [])]
                arguments.append((flag, inv_scale, True, *ends, *norms))
            else:
                arguments.append((flag, inv_scale, *ends))
        grads = self._plan.run([], arguments, may_share=False, takes=True)
        if grads is None:
            return False, None
        if update is not None:
            found_inf.update, found_inf.is_updated = None, True
            ops.wrote(update[:3])
        if self._masters is None:
            return True, None
        total, each, *again = norms
        checked: list[tuple[Sequence[int], Tensor]] = [(range(len(self._masters)), each)]
        return True, Pending(self._masters, self._place, grads[0], factor, total, checked, *again)
