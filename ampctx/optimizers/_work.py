"""The op calls of a step: reads what the step is given, and makes the calls."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampctx._data_writes import message
from ampctx.kernels import foreach, reference_steps, steps, tensor_loops
from ampctx.kernels.foreach import Factor, PerDevice, move
from ampctx.kernels.grouping import buckets, stacks
from ampctx.kernels.ops import factor, is_watched
from ampctx.kernels.plan import marks
from ampctx.kernels.reference import KERNEL_DTYPES, is_dense, overwrite, same_layout
from ampctx.kernels.reference_steps import WRITE_BACKS
from ampctx.kernels.sharding import any_sharded, is_sharded, local, part_number, place_grads, wrote
from ampctx.kernels.spec import OPTIMIZERS
from ampctx.optimizers._options import FLAGS, Group, check_one_element, param_name, refuse_sparse
from ampctx.optimizers._state_types import forms_of, smallest_coded, states_of
from ampctx.weights.step import Step
from ampctx.weights.store import EXTRAS

logger = logging.getLogger("ampctx")
_KNOWN_DTYPES = (*KERNEL_DTYPES, torch.int16, torch.int8, torch.uint8)
# By op: the bool options of a group, and those that switch one of its lists of state on.
_SWITCHES = {name: (*FLAGS[name], *(s.if_set for s in spec.sized if s.if_set)) for name, spec in OPTIMIZERS.items()}
_FACTORS = ("inv_scale", "lr", "global_grad_norm", "grad_norm")


# --- what a step is given ---------------------------------------------------------------------------------------------


def given_to(optimizer: Any, given: Step | None) -> Step:
    """The input of a step: amp's ``found_inf``, which includes that of the optimizer, or the attributes ``found_inf``
    and ``grad_scale`` in types that the ops accept. No host sync."""
    scale = getattr(optimizer, "grad_scale", None)
    if given is None:
        flag = getattr(optimizer, "found_inf", None)
        if flag is not None:
            if not isinstance(flag, Tensor):
                flag = torch.tensor(float(flag), dtype=torch.float32, device="cpu")
            if flag.numel() != 1:
                check_one_element("found_inf", flag)
            flag = PerDevice(flag if flag.dtype in (torch.float32, torch.int32) else (flag != 0).to(torch.int32))
        given = Step(flag)
    if scale is None:
        return given
    if isinstance(scale, Tensor) and scale.numel() != 1:
        check_one_element("grad_scale", scale)
    inv_scale = PerDevice(scale.float().reciprocal()) if isinstance(scale, Tensor) else 1.0 / scale
    return given._replace(inv_scale=inv_scale, unscales=True)


def on_device(value: float | Tensor, device: torch.device) -> float | Tensor:
    """A factor for an op on ``device``: a number, or a tensor on the CPU or on ``device``. No host sync."""
    if not isinstance(value, Tensor):
        return value
    if value.device.type == "cpu":
        return value if value.dtype in (torch.float32, torch.float64) else value.double()
    return move(value.float(), device)


# --- calls ------------------------------------------------------------------------------------------------------------


class Members(NamedTuple):
    """Parameters of one kind with gradients, these gradients, the numbers of the parameters in all groups, and the
    places of their groups."""

    params: list[Tensor]
    grads: list[Tensor]
    numbers: list[int]
    rows: list[int]


# The destination (a write back, or "model" for the model weight of amp's master), whether the gradients are pending,
# and whether the parameters are large enough for 8-bit codes.
Kind = tuple[str, bool, bool]
# The ``numbers`` of op calls, by their device and values.
Numbers = dict[tuple[torch.device, tuple[int, ...]], Tensor]
# Enough for the calls of some steps. A run whose parameters with gradients change would add new ones without end.
_MOST_NUMBERS = 64


class Work(NamedTuple):
    """One op call that steps ``members``. Without ``fused`` plain torch steps them one by one.

    ``group``: that of the members, or of the first. ``lists``: by the names of the op's arguments.
    """

    group: Group
    kind: Kind
    device: torch.device
    fused: bool
    members: list[Tensor]
    lists: dict[str, Any]
    sharded: bool = False  # whether some members are DTensors
    # The numbers of the members, and the op's ``stochastic_state`` and ``numbers`` if it draws random bits.
    numbers: Sequence[int] = ()
    random: Mapping[str, Any] = {}
    # (gradient, its copy for the op), for gradients to unscale.
    relaid: Sequence[tuple[Tensor, Tensor]] = ()
    # Of members of several groups: these, and the place of each one's group among them.
    groups: Sequence[Group] = ()
    rows: Sequence[int] = ()

    def of_groups(self, groups: Sequence[Group], rows: Sequence[int]) -> Work:
        """The call with the groups that its members belong to: those at ``rows`` of ``groups``."""
        used = {row: i for i, row in enumerate(dict.fromkeys(rows))}
        own = [groups[row] for row in used]
        return self._replace(group=own[0], groups=own if len(own) > 1 else (), rows=[used[row] for row in rows])

    @property
    def is_pending(self) -> bool:
        return self.kind[1]

    @property
    def write_back(self) -> str:
        return "copy" if self.kind[0] == "model" else self.kind[0]

    @property
    def is_plain(self) -> bool:
        """Whether the op reads and writes the program's own tensors, or parts of them, and no copies."""
        return self.fused and not self.relaid

    def parts(self, kinds: Sequence[Any], most: int) -> list[Work]:
        """The call as several, each for members of one kind with up to ``most`` elements, or for one that has more."""
        found, relaid = [], self.relaid
        for places in stacks(zip(kinds, map(Tensor.numel, self.lists["params"]), strict=True), most):
            lists = {name: [ts[i] for i in places] if ts else ts for name, ts in self.lists.items()}
            members, numbers = [self.members[i] for i in places], [self.numbers[i] for i in places]
            # All copies of gradients go with the first.
            part = self._replace(members=members, lists=lists, numbers=numbers, relaid=relaid)
            found.append(part.of_groups(self.groups, [self.rows[i] for i in places]) if self.groups else part)
            relaid = ()
        return found

    def drawing(self, made: Numbers) -> Work:
        """The call with the numbers of the parameters that have elements, int64 on the device, if it draws random bits.
        Made once: the address stays. No host sync."""
        if not self.random:
            return self
        pairs = zip(self.numbers, self.lists["params"], strict=True)
        key = self.device, tuple(number for number, p in pairs if p.numel())
        found = made[key] if key in made else move(torch.tensor(key[1], dtype=torch.int64, device="cpu"), self.device)
        if key not in made and not torch.compiler.is_compiling():
            if len(made) >= _MOST_NUMBERS:
                del made[next(iter(made))]
            made[key] = found
        return self._replace(random={**self.random, "numbers": found})


def members_of(optimizer: Any, step: Step) -> dict[tuple[Any, Kind], Members]:
    """The parameters with gradients, by the settings of their groups and by kind, after all checks."""
    pending_grads = {} if step.pending is None else step.pending.grads
    found: dict[tuple[Any, Kind], Members] = {}
    first = 0
    for g, (group, settings) in enumerate(zip(optimizer.param_groups, settings_of(optimizer), strict=True)):
        place_grads(group["params"])
        coded_from = smallest_coded(group)
        for i, p in enumerate(group["params"]):
            if optimizer._has_repeats and any(p is other for other in group["params"][:i]):
                continue
            # Reading .grad of a master would materialize its pending gradient.
            grad = pending_grads.get(p)
            is_pending = grad is not None
            if grad is None and (grad := p.grad) is None:
                continue
            if grad.layout is not torch.strided:
                refuse_sparse(type(optimizer).__name__, param_name(optimizer.param_groups, g, i))
            optimizer._check_param(g, i, p)
            destination = "model" if p in step.models else optimizer.layout_of(p)
            key = settings, (destination, is_pending, p.numel() >= coded_from)
            members = found.setdefault(key, Members([], [], [], []))
            members.params.append(p)
            members.grads.append(grad)
            members.numbers.append(first + i)
            members.rows.append(g)
        first += len(group["params"])
    return found


def tell_of_data_writes(optimizer: Any) -> None:
    """Warns once of weights with masters that a program has written through ``.data``."""
    seen, key = optimizer._seen if optimizer._plan is None else optimizer._plan.seen(), EXTRAS["copy"]
    places = {p: (g, i) for g, group in enumerate(optimizer.param_groups) for i, p in enumerate(group["params"])}
    same = [p for p, mark in seen.items() if p in places and key in optimizer.state.get(p, ()) and mark == marks([p])]
    if found := optimizer._data_writes.found([(p, optimizer.state[p][key]) for p in same if not is_sharded(p)]):
        names = (param_name(optimizer.param_groups, *places[p]) for p in found)
        logger.warning("%s: %s", type(optimizer).__name__, message(names))


def in_layout_of(p: Tensor, grad: Tensor) -> Tensor:
    """``grad``, or a copy for the kernels: in the layout of ``p``, and with its values in memory."""
    if same_layout(grad, p) or not is_dense(p):
        return grad if tensor_loops.all_resolved([grad]) else grad.clone()
    return torch.empty_like(p, dtype=grad.dtype, requires_grad=False).copy_(grad)


def works_of(optimizer: Any, kind: Kind, members: Members, step: Step) -> Iterator[Work]:
    """The op calls that step ``members`` of ``optimizer``, one for each device and combination of dtypes. Plain torch
    takes one group at a time. Makes their state."""
    group, (destination, is_pending, in_codes) = optimizer.param_groups[members.rows[0]], kind
    forms = forms_of(OPTIMIZERS[optimizer._op_of(group)], group, in_codes)
    states = states_of(optimizer, forms, destination, members.params)
    targets, extra = members.params, []
    if destination == "model":
        extra = [step.models[p] for p in targets]
    elif destination in EXTRAS:
        extra = [state[EXTRAS[destination]] for state in states]
        if destination == "copy":
            targets, extra = extra, targets
    # Local parts of DTensors, which may have another layout.
    params, extras, given = local(targets), local(extra), local(members.grads)
    resolved = tensor_loops.all_resolved(given)
    grads = [
        grad if resolved and grad.is_contiguous() and p.is_contiguous() else in_layout_of(p, grad)
        for p, grad in zip(params, given, strict=True)
    ]
    relaid: Sequence[tuple[Tensor, Tensor]] = ()
    if step.unscales and not is_pending:
        changed = ((grad, copy) for grad, copy in zip(given, grads, strict=True) if copy is not grad)
        # torch refuses to write a ZeroTensor
        relaid = [(grad, copy) for grad, copy in changed if resolved or not grad._is_zerotensor()]
    compared = {"grads": grads, "params": params, **({"extras": extras} if extras else {})}
    compared |= {name: [state[key] for state in states] for name, key in forms.sized.items() if key is not None}
    along = {name: local([state[key] for state in states]) for name, key in forms.along.items()}
    empty: dict[str, list[Tensor]] = {name: [] for name in ("extras", *forms.sized)}
    sharded = any_sharded(members.params)
    beside = [*along.values(), members.params, members.numbers, members.rows]
    found = buckets(*compared.values(), along=beside, known_dtypes=_KNOWN_DTYPES)
    for device, fused, (*lists, stepped, numbers, rows) in found:
        named = {**empty, **dict(zip([*compared, *along], lists, strict=True))}
        random = {"stochastic_state": bool(forms.dtypes)} if forms.dtypes or destination == "stochastic" else {}
        if random and sharded:
            # Numbers of their own for the parts of a DTensor: places in memory begin at 0 in each.
            numbers = [n + (part_number(p) << 32) for p, n in zip(stepped, numbers, strict=True)]
        work = Work(group, kind, device, fused, stepped, named, sharded, numbers, random, relaid)
        work = work if len(optimizer.param_groups) == 1 else work.of_groups(optimizer.param_groups, rows)
        yield from [work] if fused or not work.groups else work.parts(work.rows, sys.maxsize)
        relaid = ()


def rows_of(optimizer: Any, work: Work) -> dict[str, Any]:
    """The numbers in which the groups of a call differ, as the op takes them: a table, and the rows of the members."""
    columns = OPTIMIZERS[optimizer._op_of(work.group)].columns
    options = [{**optimizer._op_options(group), "lr": group["lr"]} for group in work.groups]
    table = [[of_group[name] for name in columns] for of_group in options]
    pairs = (table, torch.float64), (work.rows, torch.int64)
    return {"rows": tuple(torch.tensor(values, dtype=dtype, device="cpu") for values, dtype in pairs)}


def each_gradient_once(works: list[Work]) -> list[Work]:
    """Copies gradients that an earlier parameter shares, so that only one call unscales each. No host sync."""
    is_traced = torch.compiler.is_compiling()  # tensors have no addresses
    seen: set[Any] = set()

    def once(grad: Tensor) -> Tensor:
        place = grad if is_traced else grad.data_ptr()
        is_first = place not in seen
        seen.add(place)
        return grad if is_first else grad.clone()

    return [
        work if work.is_pending else work._replace(lists={**work.lists, "grads": list(map(once, work.lists["grads"]))})
        for work in works
    ]


def unscale(grads: Sequence[Tensor], found_inf: PerDevice | None, factor: Factor) -> None:
    """Unscales gradients in place, unless the step is skipped. No host sync."""
    if found_inf is not None:
        flag = found_inf.value
        inv_scale = factor.on(flag.device) if isinstance(factor, PerDevice) else factor
        factor = PerDevice(torch.where(flag.reshape(()) != 0, 1.0, inv_scale).float())
    dense = [grad if is_dense(grad) else grad.clone() for grad in grads]  # torch writes no expanded tensor
    foreach.scale(dense, dense, foreach.Unread(), factor)
    for grad, copy in zip(grads, dense, strict=True):
        if copy is not grad:
            overwrite(grad, copy)


def settings_of(optimizer: Any) -> list[tuple[Any, ...]]:
    """For each group, the options that choose its op call and state, and what cannot differ within a call. Groups with
    equal ones share calls. A plan is dropped when they change."""
    # A step of a subclass, or over ranks, reads the options of one group.
    over_ranks = optimizer._split_step and any_sharded(p for g in optimizer.param_groups for p in g["params"])
    joins, found = not (optimizer._has_own_launch or over_ranks), []
    for g, group in enumerate(optimizer.param_groups):
        op, kept = optimizer._op_of(group), group.get("state_dtype")
        kept = tuple(kept.items()) if isinstance(kept, dict) else kept
        alone = None if joins and not isinstance(group["lr"], Tensor) else g
        switches = map(bool, map(group.get, _SWITCHES[op]))
        found.append((op, alone, kept, group.get("min_8bit_size"), group["seed"], *switches))
    return found


def writes_all(works: Sequence[Work], step: Step) -> bool:
    """Whether the calls write every weight of ``models``."""
    return sum(len(work.members) for work in works if work.kind[0] == "model") == len(step.models)


def finish_unscaling(works: Sequence[Work]) -> None:
    """Writes back unscaled gradients that the ops had copies of, and bumps the versions of DTensors whose parts were
    written. After a skipped step the values are the same. No host sync."""
    for work in works:
        for grad, copy in work.relaid:
            overwrite(grad, copy)
        if work.sharded and not work.is_pending:
            wrote([p.grad for p in work.members if p.grad is not None])


def defaults_of(op: str, work: Work) -> dict[str, Any]:
    """The arguments of an op in place of those that a step does not give it."""
    own = {given.name: given.default for given in inspect.signature(getattr(steps, op)).parameters.values()}
    return {**own, **work.random, "write_back": WRITE_BACKS.index(work.write_back)}


def call(op: str, work: Work, arguments: dict[str, Any]) -> None:
    """Calls ``op`` of ``ampctx.optimizer_ops`` on the lists of ``work``, or its reference if no kernel accepts them."""
    if work.fused:
        given = {**work.random, **arguments}
        if not torch.compiler.is_compiling() and is_watched():  # FakeTensorMode refuses the defaults
            none, no_table = (torch.empty(0, dtype=dtype, device="cpu") for dtype in (torch.int64, torch.float64))
            given = {"numbers": none, "rows": (no_table, none), **given}
        getattr(steps, op)(**work.lists, **given, write_back=work.write_back)
    else:
        tensors = {name: factor(value) for name, value in arguments.items() if name in _FACTORS}
        code = WRITE_BACKS.index(work.write_back)
        reference_steps.run(op, {**work.lists, **arguments, **tensors, **work.random, "write_back": code})
