"""The plan of a fused optimizer's step: the op calls of the step before, with new gradients and options."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain, repeat
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor

from ampctx.kernels import ops, tensor_loops
from ampctx.kernels.foreach import PerDevice, Unread
from ampctx.kernels.ops import OpCall
from ampctx.kernels.plan import Column, Entries, Plan, PlannedCall, advanced, make_plan, marks, same_groups
from ampctx.kernels.reference import compute_dtype
from ampctx.kernels.sharding import local, may_arrive_as_sums
from ampctx.kernels.spec import OPTIMIZERS
from ampctx.kernels.tensor_loops import stored_grad
from ampctx.optimizers import _state_types
from ampctx.optimizers._options import Group
from ampctx.optimizers._state_types import forms_of
from ampctx.optimizers._work import Work, defaults_of, settings_of, writes_all
from ampctx.weights.step import Step
from ampctx.weights.store import EXTRAS


def step_plan(optimizer: Any, works: list[Work], calls: list[OpCall], step: Step) -> StepPlan | None:
    """The plan of the step whose ``works`` were just made as ``calls``. None for what plans do not serve: copies of
    gradients, sums of ranks still to be made, plain torch in place of a kernel, and what csrc/plan.h cannot read."""
    norms = [call for call in calls if call.op == "multi_tensor_unscale_l2norm"]
    calls = calls[len(norms) :]
    if len(calls) != len(works) or not all(work.is_plain for work in works):
        return None
    if may_arrive_as_sums(p for group in optimizer.param_groups for p in group["params"]):
        return None
    grads_of = {} if step.pending is None else step.pending.grads
    for work in works:
        own: list[Any] = [grads_of.get(p) if work.is_pending else stored_grad(p) for p in work.members]
        if not tensor_loops.same_items(local(own), work.lists["grads"]):
            return None
    planned = [_planned(optimizer, work, call) for work, call in zip(works, calls, strict=True)]
    norm_type = None
    if len(norms) == len(works) == 1 and not works[0].is_pending:
        planned.insert(0, PlannedCall(norms[0].op, [planned[0].columns[0]], ()))
        norm_type = compute_dtype(*works[0].lists["grads"])
    stepped = {id(p) for work in works for p in work.members}
    idle = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in stepped]
    state = optimizer.state
    plan = make_plan(optimizer.param_groups, planned, [(state, list(state), list(state.values()))], idle)
    return None if plan is None else StepPlan(plan, optimizer, works, step, norm_type)


def _planned(optimizer: Any, work: Work, call: OpCall) -> PlannedCall:
    spec = OPTIMIZERS[optimizer._op_of(work.group)]
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


# The attributes of optimizers that are numbers of op calls, or choose these.
_ATTRIBUTES = {"write_back", "master_weights", "_reduced_precision_dtype"}
_ATTRIBUTES |= {n.of for spec in OPTIMIZERS.values() for n in spec.numbers if n.of and isinstance(n.of, str)}
_FIXED = (float, int, bool, str, type(None), torch.dtype)


def attributes_of(optimizer: Any) -> list[Any]:
    return list(map(getattr, repeat(optimizer), _ATTRIBUTES, repeat(None)))


def entries_of(group: Group, names: Sequence[str]) -> Entries:
    """The options ``names`` of a group, which it has to keep, and the type of lr."""
    return group, list(group), [type(v) if k == "lr" else v if k in names else object for k, v in group.items()]


def is_fixed(option: Any) -> bool:
    """Whether no program can change the value in place, nor make it one to check."""
    is_tuple = type(option) is tuple and set(map(type, option)) == {float}
    return option is float or option is object or type(option) in _FIXED or is_tuple


class StepPlan:
    """Refers to state, not to gradients. ``norm_type``: the dtype of the norm that its first call finds."""

    def __init__(self, plan: Plan, optimizer: Any, works: list[Work], step: Step, norm_type: Any) -> None:
        self._plan, self._state, self._models, self._unscales = plan, optimizer.state, step.models, step.unscales
        self._norm_type = norm_type
        # Without tensors: the plan has those that it keeps.
        self._works = [work._replace(lists={name: [] for name in work.lists}) for work in works]
        ops_of = [optimizer._op_of(work.group) for work in works]
        specs = [OPTIMIZERS[op] for op in ops_of]
        self._takers = [itemgetter("skips", *spec.values) for spec in specs]
        self._defaults = list(map(defaults_of, ops_of, works))
        self._has_norm = any(spec.factors for spec in specs)  # whether ops are given the norm of all gradients
        self._settings = [*attributes_of(optimizer), *settings_of(optimizer)]
        self._writes_all = writes_all(works, step)
        self._masters = None if step.pending is None else step.pending.masters
        # By call: the places of its members among the masters with pending gradients, or None where it reads ``.grad``.
        place_of = {} if self._masters is None else {id(p): i for i, p in enumerate(self._masters)}
        self._places = [[place_of[id(p)] for p in work.members] if work.is_pending else None for work in works]
        # 16-bit weights whose masters, remainders or compensations must follow later writes.
        self._followed = [p for work in works if work.kind[0] in EXTRAS for p in work.members]
        self._marks = marks(self._followed)
        self._names = [name for name in (*optimizer.defaults, *_state_types.DEFAULTS) if name != "lr"]
        self.renew(optimizer)

    def knows(self, optimizer: Any) -> bool:
        """Whether all options are the values that were checked, lr excepted, which is a float again."""
        is_same = self._options is not None and same_groups(optimizer.param_groups, self._options)
        return is_same and all(map(is_, attributes_of(optimizer), self._attributes))

    def renew(self, optimizer: Any) -> None:
        """Takes over checked options. Where they need other calls, the plan runs no more."""
        self._attributes = attributes_of(optimizer)
        found = [entries_of(group, self._names) for group in optimizer.param_groups]
        self._options = found if all(map(is_fixed, chain(self._attributes, *(row[2] for row in found)))) else None
        self._fits = self._settings == [*self._attributes, *settings_of(optimizer)]
        if not self._fits:
            return
        self._fixed = [{**own, **optimizer._numbers_of(w)} for own, w in zip(self._defaults, self._works, strict=True)]
        for fixed in self._fixed:
            table, fixed["rows"] = fixed["rows"]
            memory = fixed["memory"] = array("d", table.flatten().tolist())
            fixed["table"] = torch.frombuffer(memory, dtype=torch.float64) if memory else table

    def seen(self) -> dict[Tensor, bytes]:
        """The marks of these weights when they agreed with their states."""
        return {p: self._marks[16 * i : 16 * i + 16] for i, p in enumerate(self._followed)}

    def run(self, optimizer: Any, step: Step) -> bool:
        """Makes the step. False if something is not as it was: nothing has changed then. No host sync."""
        pending, masters = step.pending, self._masters
        grads: list[Any] | None = None
        if (
            not self._fits
            or ops.is_watched()
            or optimizer.state is not self._state
            or step.models is not self._models
            or step.unscales is not self._unscales
            or (self._followed and self._marks != marks(self._followed))
            or (pending is None) is not (masters is None)
        ):
            return False
        if pending is not None and masters is not None:
            if pending.masters is not masters and not tensor_loops.same_items(pending.masters, masters):
                return False
            value_at = pending.values.__getitem__
            grads = []
            for places in self._places:
                grads.append(None if places is None else list(map(value_at, places)))
        (norm, given), has_run = self._norm(optimizer, step, grads) if self._has_norm else (None, []), False
        counts = list(step.counts or ())
        try:
            for work, take, fixed in zip(self._works, self._takers, self._fixed, strict=True):
                if table := fixed["memory"]:  # of rows, each with its lr first
                    table[:: len(table) // len(work.groups)] = array("d", [group["lr"] for group in work.groups])
                given.append(take({**fixed, **optimizer._numbers_now(work, step, norm)}))
            has_run = self._plan.run(optimizer.param_groups, given, grads, not self._unscales) is not None
        finally:
            if not has_run and step.counts is not None:
                step.counts[:] = counts
        if not has_run:
            return False
        if self._writes_all and step.wrote is not None:
            step.wrote()
        self._marks = advanced(self._marks)
        return True

    def _norm(self, optimizer: Any, step: Step, grads: list[Any] | None) -> tuple[PerDevice | None, list[Any]]:
        """The norm of all gradients, and the arguments of the call that finds it."""
        if (dtype := self._norm_type) is not None:
            device, inv_scale = self._works[0].device, step.inv_scale
            factor = inv_scale.on(device) if isinstance(inv_scale, PerDevice) else inv_scale
            norm, each = (torch.empty(size, dtype=dtype, device=device) for size in ((), 0))
            return PerDevice(norm), [(Unread().on(device), factor, False, norm, each)]
        given = grads or [None] * len(self._works)
        now = [
            local(list(map(stored_grad, work.members))) if own is None else own
            for work, own in zip(self._works, given, strict=True)
        ]
        if {None if grad is None else grad.layout for own in now for grad in own} != {torch.strided}:
            return None, []  # the plan finds the same, and does not run
        works = [work._replace(lists={**work.lists, "grads": own}) for work, own in zip(self._works, now, strict=True)]
        return optimizer._global_norm(works, step), []
