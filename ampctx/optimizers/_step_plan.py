"""The plan of a fused optimizer's step: the op calls of the step before, with new gradients and options."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ampctx.kernels import ops, tensor_loops
from ampctx.kernels.foreach import PerDevice
from ampctx.kernels.ops import OpCall
from ampctx.kernels.plan import Column, Plan, PlannedCall, make_plan, marks
from ampctx.kernels.sharding import local, may_arrive_as_sums
from ampctx.kernels.spec import SPECS
from ampctx.kernels.tensor_loops import stored_grad
from ampctx.optimizers._state_types import forms_of
from ampctx.optimizers._work import Scaling, Work, defaults_of, settings_of, writes_all
from ampctx.weights.pending import Pending
from ampctx.weights.store import EXTRAS


def step_plan(optimizer: Any, works: list[Work], calls: list[OpCall], scaling: Scaling) -> StepPlan | None:
    """The plan of the step whose ``works`` were just made as ``calls``. None for what plans do not serve: copies of
    gradients, sums of ranks still to be made, plain torch in place of a kernel, and what csrc/plan.h cannot read."""
    if len(calls) != len(works) or not all(work.is_plain for work in works):
        return None
    if may_arrive_as_sums(p for group in optimizer.param_groups for p in group["params"]):
        return None
    grads_of = {} if scaling.pending is None else scaling.pending.grads
    for work in works:
        own: list[Any] = [grads_of.get(p) if work.is_pending else stored_grad(p) for p in work.members]
        if not tensor_loops.same_items(local(own), work.lists["grads"]):
            return None
    planned = [_planned(optimizer, work, call) for work, call in zip(works, calls, strict=True)]
    stepped = {id(p) for work in works for p in work.members}
    idle = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in stepped]
    state = optimizer.state
    plan = make_plan(optimizer.param_groups, planned, [(state, list(state), list(state.values()))], idle)
    return None if plan is None else StepPlan(plan, optimizer, works, scaling)


def _planned(optimizer: Any, work: Work, call: OpCall) -> PlannedCall:
    spec = SPECS[optimizer._op_of(work.group)]
    forms = forms_of(spec, work.group, work.kind[2])
    keys = {**{name: key for name, key in forms.sized.items() if key is not None}, **forms.along}
    if (destination := work.kind[0]) in EXTRAS:
        keys["params" if destination == "copy" else "extras"] = EXTRAS[destination]
    entries = [optimizer.state[p] for p in work.members]
    # A DTensor in place of its part.
    whole = {id(part): p for part, p in zip(local(work.members), work.members, strict=True)} if work.sharded else {}
    columns: list[Column] = []
    for name, tensors in zip(spec.lists, call.lists, strict=True):
        if name == "skips":
            columns.append(None)
        elif name == "grads":
            columns.append((list(work.members), list(map(stored_grad, work.members)) if whole else list(tensors)))
        elif name in keys and len(tensors):
            columns.append((entries, keys[name], [entry[keys[name]] for entry in entries]))
        else:
            columns.append([whole[id(t)] for t in tensors] if whole else list(tensors))
    writes = ("params", "extras", *(["grads"] if call.op == spec.unscaling_op else []))
    written = tuple(i for i, name in enumerate(spec.lists) if name in writes and call.lists[i])
    return PlannedCall(call.op, columns, written)


class StepPlan:
    """Refers to state, not to gradients."""

    def __init__(self, plan: Plan, optimizer: Any, works: list[Work], scaling: Scaling) -> None:
        self._plan, self._state, self._models, self._unscales = plan, optimizer.state, scaling.models, scaling.unscales
        # Without tensors: the plan has those that it keeps.
        self._works = [work._replace(lists={name: [] for name in work.lists}) for work in works]
        ops_of = [optimizer._op_of(work.group) for work in works]
        specs = [SPECS[op] for op in ops_of]
        self._takers = [itemgetter("skips", *spec.values) for spec in specs]
        self._defaults = list(map(defaults_of, ops_of, works))
        self._has_norm = any(spec.factors for spec in specs)  # whether ops are given the norm of all gradients
        self._settings = settings_of(optimizer)
        self._writes_all = writes_all(works, scaling)
        self._pending_masters = None if scaling.pending is None else list(scaling.pending.masters)
        # 16-bit weights whose masters, remainders or compensations must follow later writes.
        self._followed = [p for work in works if work.kind[0] in EXTRAS for p in work.members]
        self._marks = marks(self._followed)

    def seen(self) -> dict[Tensor, bytes]:
        """The marks of these weights when they agreed with their states."""
        return {p: self._marks[16 * i : 16 * i + 16] for i, p in enumerate(self._followed)}

    def run(self, optimizer: Any, scaling: Scaling) -> bool:
        """Makes the step. False if something is not as it was: nothing has changed then. No host sync."""
        pending = scaling.pending
        if (
            ops.is_watched()
            or optimizer.state is not self._state
            or scaling.models is not self._models
            or scaling.unscales is not self._unscales
            or self._settings != settings_of(optimizer)
            or (self._followed and self._marks != marks(self._followed))
        ):
            return False
        grads = None
        if pending is not None or self._pending_masters is not None:
            grads = self._grads_of(pending)
            if grads is None:
                return False
        norm, has_run = self._norm(optimizer, scaling, grads) if self._has_norm else None, False
        try:
            given = [
                take({**defaults, **optimizer._arguments(work, scaling, norm)})
                for work, take, defaults in zip(self._works, self._takers, self._defaults, strict=True)
            ]
            has_run = self._plan.run(optimizer.param_groups, given, grads, not self._unscales) is not None
        finally:
            if not has_run and scaling.skips is not None:
                scaling.skips.is_taken = False
        if not has_run:
            return False
        if self._writes_all and scaling.wrote is not None:
            scaling.wrote()
        if self._followed:
            self._marks = marks(self._followed)
        return True

    def _grads_of(self, pending: Pending | None) -> list[Any] | None:
        """The pending gradients of each call, or None where it reads ``.grad``. None if others are pending now."""
        if pending is None or self._pending_masters is None:
            return None
        if not tensor_loops.same_items(pending.masters, self._pending_masters):
            return None
        found: list[Any] = []
        for work in self._works:
            whole = tensor_loops.same_items(work.members, pending.masters)
            grads = pending.values if whole else [pending.grads[p] for p in work.members] if work.is_pending else None
            found.append(grads if grads is None else list(grads))
        return found

    def _norm(self, optimizer: Any, scaling: Scaling, grads: list[Any] | None) -> PerDevice | None:
        given = grads or [None] * len(self._works)
        now = [
            local(list(map(stored_grad, work.members))) if own is None else own
            for work, own in zip(self._works, given, strict=True)
        ]
        if {None if grad is None else grad.layout for own in now for grad in own} != {torch.strided}:
            return None  # the plan finds the same, and does not run
        works = [work._replace(lists={**work.lists, "grads": own}) for work, own in zip(self._works, now, strict=True)]
        return optimizer._global_norm(works, scaling)
