"""The plan of the end of a frame: the op calls that unscaled and checked the gradients of the frame before.

It serves one open block without gradients from before, on one device. Anything else is plain code's: ``Frames.leave``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ampctx.kernels import ops
from ampctx.kernels.foreach import Factor, FoundInf, PerDevice
from ampctx.kernels.ops import OpCall
from ampctx.kernels.plan import Plan, PlannedCall, make_plan
from ampctx.kernels.sharding import local, may_arrive_as_sums
from ampctx.kernels.tensor_loops import all_there, clear_grads, dtype_of, same_items, store_grads, stored_grad
from ampctx.weights.masters import MasterParams
from ampctx.weights.pending import Pending, fills_its_storage, new_grads

_SCALE, _NORM = "multi_tensor_scale", "multi_tensor_unscale_l2norm"
_UPDATE = "_and_update"
# Of an op call: its name, the parameters whose gradients it reads, and their masters, if it makes new gradients for them.
Call = tuple[str, list[Tensor], list[Tensor]]


def frame_plan(
    masters: MasterParams, calls: list[OpCall], grads: list[Tensor | None], factor: Factor, made: Pending | None
) -> FramePlan | None:
    """The plan of ``calls``, made on the ``grads`` of the leaves, in their order. ``made``: the pending gradients that
    came of them."""
    # Where the factor is 1 plain code does not look at other gradients.
    leaves = masters.params_with_master if factor == 1.0 else masters.leaves
    if masters.has_sharded and (factor == 1.0 or may_arrive_as_sums(leaves)):
        return None
    there = [(p, grad) for p, grad in zip(leaves, grads, strict=False) if grad is not None]
    # By the gradient, or this rank's part of it.
    leaf_of = {id(part): pair for part, pair in zip(local([grad for _, grad in there]), there, strict=True)}
    if len(leaf_of) < len(there):
        return None  # parameters share a gradient, and the next block may give each its own
    planned: list[PlannedCall] = []
    steps: list[Call] = []
    views: list[Tensor] = []
    for op, (src, *dst), _ in calls:
        ids, expected = list(map(id, src)), _SCALE if made is None or planned else _NORM
        if op.removesuffix(_UPDATE) != expected or not leaf_of.keys() >= set(ids):
            return None  # copies of gradients, or sums
        params, whole = map(list, zip(*map(leaf_of.pop, ids), strict=True))
        takers: list[Tensor] = []
        if dst and not same_items(src, *dst):
            takers = [master for _, master in masters.pairs_of(params)]
            views += [p for p, grad in zip(params, whole, strict=True) if not fills_its_storage(grad)]
            if not same_items(list(map(stored_grad, takers)), *dst):
                return None
        columns = [(params, whole), *(None if takers else (params, whole) for _ in dst)]
        planned.append(PlannedCall(op, columns, (1,) if dst and not takers else ()))
        steps.append((op, params, takers))
    without = [p for p, grad in zip(leaves, grads, strict=False) if grad is None]
    plan = None if leaf_of else make_plan([], planned, idle=without)
    return None if plan is None else FramePlan(plan, masters, steps, views, factor == 1.0, made)


class FramePlan:
    """Attributes:
    leaves: the list of leaves that it is for.
    """

    def __init__(
        self, plan: Plan, masters: MasterParams, calls: list[Call], views: list[Tensor], is_one: bool, made: Pending | None
    ) -> None:
        self._plan, self._calls, self.leaves, self._place = plan, calls, masters.leaves, masters.place
        self._device = calls[0][1][0].device
        self._kind = calls[-1][0].endswith(_UPDATE), is_one
        self._masters = None if made is None else made.masters
        # Whose gradients it does not see.
        self._others = masters.params_without_master if is_one else []
        self._dtypes = list(map(dtype_of, self._others))
        # Why gradients do not wait for an optimizer that reads them: they lie in memory that other code may write to.
        self._views = views[:1] if masters.takes_pending else []

    def leave(self, factor: Factor, found_inf: FoundInf) -> tuple[bool, Pending | None]:
        """Ends the frame: whether it has, and the pending gradients. Where it has not, nothing has changed. No host
        sync."""
        update, device, differs = found_inf.update, self._device, (False, None)
        is_usual = self._kind == (update is not None, factor == 1.0) and not any(map(_may_wait, self._views))
        if not is_usual or ops.is_watched() or list(map(dtype_of, self._others)) != self._dtypes:
            return differs
        flag, inv_scale = found_inf.on(device), factor.on(device) if isinstance(factor, PerDevice) else factor
        norms: list[Tensor] = []
        new: list[tuple[list[Tensor], list[Tensor], list[Tensor]]] = []
        arguments: list[tuple[Any, ...]] = []
        for op, params, takers in self._calls:
            ends = update if op.endswith(_UPDATE) and update is not None else ()
            if op.startswith(_NORM):
                each = torch.empty(len(params), dtype=torch.float32, device=device)
                norms = [torch.empty_like(flag), each, *([torch.empty_like(flag)] if ends else [])]
                arguments.append((flag, inv_scale, True, *ends, *norms))
            else:
                if takers:
                    if not all_there(given := list(map(stored_grad, params))):
                        return differs
                    new.append((params, takers, new_grads(takers, given)))
                arguments.append((*(new[-1][2:] if takers else ()), flag, inv_scale, *ends))
        grads = self._plan.run([], arguments, may_share=False, takes=self._masters is not None)
        if grads is None:
            return differs
        for params, takers, wide in new:
            clear_grads(params)
            store_grads(takers, wide)
            self._place.has_grads = True
        if update is not None:
            found_inf.update, found_inf.is_updated = None, True
            ops.wrote(update[:3])
        if self._masters is None:
            return True, None
        total, each, *again = norms
        every = range(len(self._masters))
        return True, Pending(self._masters, self._place, grads[0], factor, total, [(every, each)], *again)


def _may_wait(p: Tensor) -> bool:
    return (grad := stored_grad(p)) is None or fills_its_storage(grad)
