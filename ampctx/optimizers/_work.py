"""The op calls of a step: what amp leaves on the optimizer for it, the calls that step its parameters, and how they
are kept for the next step.

Between two steps the gradients are new and the rest is not. To make the calls anew takes a dozen passes over the
parameters in Python; to see that they still hold takes a few in C (``map`` over ``operator``, ``ops.read_along``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, repeat
from operator import is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ampctx.kernels import reference_steps, steps
from ampctx.kernels.each import grad_of, version_of
from ampctx.kernels.foreach import Factor, PerDevice, move, product
from ampctx.kernels.grouping import buckets
from ampctx.kernels.ops import HeldTensors, are_apart, can_be_held, extension, factor, read_along
from ampctx.kernels.reference import KERNEL_DTYPES, is_dense, overwrite, same_layout
from ampctx.kernels.reference_steps import WRITE_BACKS
from ampctx.kernels.sharding import any_sharded, local, wrote
from ampctx.masters.lazy_grads import MasterParam, ModelGrads
from ampctx.optimizers._options import Group, check_one_element
from ampctx.optimizers._state import EXTRAS, State

_KNOWN_DTYPES = (*KERNEL_DTYPES, torch.int16)
_FACTORS = ("inv_scale", "lr", "global_grad_norm")


# --- what amp leaves --------------------------------------------------------------------------------------------------


class Scaling(NamedTuple):
    """What one step finds.

    found_inf: one element; where it is not 0, the op leaves everything as it is. None: nobody looked.
    inv_scale: what the gradients in ``.grad`` are to be multiplied by.
    models: fp32 master to the 16-bit weight that is written with it.
    pending: 16-bit gradients that stand for those of masters, with a factor of their own.
    unscales: whether the gradients in ``.grad`` become what the step computes with, as torch's fused optimizers leave
        them where they get a ``grad_scale``.
    """

    found_inf: PerDevice | None = None
    inv_scale: Factor = 1.0
    models: Mapping[Tensor, Tensor] = {}
    pending: ModelGrads | None = None
    unscales: bool = False


def scaling_of(optimizer: Any, grad_factor: Factor) -> Scaling:
    """Reads ``found_inf``, ``grad_scale``, ``model_params`` and ``model_grads``, which exist around a step only."""
    is_scaled = getattr(optimizer, "grad_scale", None) is not None
    return Scaling(
        taken_found_inf(optimizer),
        product(taken_inv_scale(optimizer), grad_factor) if is_scaled else grad_factor,
        getattr(optimizer, "model_params", None) or {},
        getattr(optimizer, "model_grads", None),
        is_scaled,
    )


def on_device(value: float | Tensor, device: torch.device) -> float | Tensor:
    """A factor as an op on ``device`` takes it: a number, or a tensor on the CPU or on ``device``. No host sync."""
    if not isinstance(value, Tensor):
        return value
    if value.device.type == "cpu":
        return value if value.dtype in (torch.float32, torch.float64) else value.double()
    return move(value.float(), device)


def taken_inv_scale(optimizer: Any) -> Factor:
    """What gradients are to be multiplied by: 1 / ``optimizer.grad_scale``, 1 without one. No host sync."""
    scale = getattr(optimizer, "grad_scale", None)
    if scale is None:
        return 1.0
    if not isinstance(scale, Tensor):
        return 1.0 / scale
    check_one_element("grad_scale", scale)
    return PerDevice(scale.float().reciprocal())


def taken_found_inf(optimizer: Any) -> PerDevice | None:
    """``optimizer.found_inf`` in a type that the ops take, None without one. No host sync."""
    flag = getattr(optimizer, "found_inf", None)
    if flag is None:
        return None
    if not isinstance(flag, Tensor):
        flag = torch.tensor(float(flag))
    if flag.numel() != 1:
        check_one_element("found_inf", flag)
    return PerDevice(flag if flag.dtype in (torch.float32, torch.int32) else (flag != 0).to(torch.int32))


# --- calls ------------------------------------------------------------------------------------------------------------


class Members(NamedTuple):
    """Parameters of a group that take part in a step, and their gradients."""

    params: list[Tensor]
    grads: list[Tensor]


# A destination (a write back, or "model": that of the model weight which amp keeps for a master), and whether the
# gradients are those of ``model_grads``.
Kind = tuple[str, bool]


class Work(NamedTuple):
    """One op call that steps ``members``. Not ``fused``: for plain torch, tensor by tensor.

    ``lists`` by the names of the op's arguments, ``keys`` where those that are state are found in the members' state.
    """

    group: Group
    kind: Kind
    device: torch.device
    fused: bool
    members: list[Tensor]
    lists: dict[str, Any]
    keys: dict[str, str]
    sharded: bool = False  # whether there are DTensors among the members
    # Of gradients that are to be unscaled, those that the op gets in another layout, and what it gets.
    relaid: Sequence[tuple[Tensor, Tensor]] = ()

    @property
    def waiting(self) -> bool:
        return self.kind[1]


def _in_layout_of(p: Tensor, grad: Tensor) -> Tensor:
    """``grad``, or a copy that the kernels can walk together with ``p``."""
    if same_layout(grad, p) or not is_dense(p):
        return grad
    return torch.empty_like(p, dtype=grad.dtype, requires_grad=False).copy_(grad)


def _targets(
    params: list[Tensor], states: list[State], destination: str, scaling: Scaling
) -> tuple[list[Tensor], list[Tensor]]:
    """The op's params and extras."""
    if destination == "model":
        return params, [scaling.models[p] for p in params]
    if destination not in EXTRAS:
        return params, []
    extras = [state[EXTRAS[destination]] for state in states]
    return (extras, params) if destination == "copy" else (params, extras)


def works_of(
    group: Group, kind: Kind, members: Members, states: list[State], sized: Mapping[str, str | None],
    one_element: Mapping[str, str], scaling: Scaling,
) -> Iterator[Work]:  # fmt: skip
    """The op calls that step ``members``, one for each device and combination of dtypes.

    Args:
        states: of the members.
        sized: the op's lists of state of the parameters' size, and under which key that is; None for an empty list.
        one_element: the same for state of one element.
    """
    destination = kind[0]
    # Parts of DTensors: their layout in memory is their own.
    params, extras = map(local, _targets(members.params, states, destination, scaling))
    given = local(members.grads)
    grads = [
        grad if grad.is_contiguous() and p.is_contiguous() else _in_layout_of(p, grad)
        for p, grad in zip(params, given, strict=True)
    ]
    relaid: Sequence[tuple[Tensor, Tensor]] = ()
    if scaling.unscales and not kind[1]:
        relaid = [(grad, copy) for grad, copy in zip(given, grads, strict=True) if copy is not grad]
    keys = {**{name: key for name, key in sized.items() if key is not None}, **one_element}
    compared = {
        "grads": grads,
        "params": params,
        **{name: [state[keys[name]] for state in states] for name in sized if name in keys},
        **({"extras": extras} if extras else {}),
    }
    along = {name: [state[key] for state in states] for name, key in one_element.items()}
    empty: dict[str, list[Tensor]] = {name: [] for name in ("extras", *sized)}
    names = [*compared, *along]
    if destination in EXTRAS:
        keys["params" if destination == "copy" else "extras"] = EXTRAS[destination]
    sharded = any_sharded(members.params)
    found = buckets(*compared.values(), along=[*along.values(), members.params], known_dtypes=_KNOWN_DTYPES)
    for device, fused, (*lists, stepped) in found:
        named = {**empty, **dict(zip(names, lists, strict=True))}
        yield Work(group, kind, device, fused, stepped, named, keys, sharded, relaid)
        relaid = ()


def each_gradient_once(works: list[Work]) -> list[Work]:
    """The calls, with a copy of each gradient that a parameter before has, too: that one's call unscales it. No host
    sync."""
    is_traced = torch.compiler.is_compiling()  # without addresses
    if not is_traced and are_apart([work.lists["grads"] for work in works if not work.waiting]):
        return works
    seen: set[Any] = set()

    def once(grad: Tensor) -> Tensor:
        place = grad if is_traced else grad.data_ptr()
        is_first = place not in seen
        seen.add(place)
        return grad if is_first else grad.clone()

    return [
        work if work.waiting else work._replace(lists={**work.lists, "grads": list(map(once, work.lists["grads"]))})
        for work in works
    ]


def finish_unscaling(works: Sequence[Work]) -> None:
    """What the calls could not write: gradients in another layout than their parameter's, and the versions of DTensors
    whose parts were written. A step that was skipped leaves the same bits. No host sync."""
    for work in works:
        for grad, copy in work.relaid:
            overwrite(grad, copy)
        if work.sharded and not work.waiting:
            wrote([p.grad for p in work.members if p.grad is not None])


def call(op: str, work: Work, arguments: dict[str, Any]) -> None:
    """``ampctx.optimizer_ops``'s ``op`` on the lists of ``work``, or its reference where no kernel takes them."""
    write_back = "copy" if work.kind[0] == "model" else work.kind[0]
    if work.fused:
        getattr(steps, op)(**work.lists, **arguments, write_back=write_back)
    else:
        tensors = {name: factor(value) for name, value in arguments.items() if name in _FACTORS}
        code = WRITE_BACKS.index(write_back)
        reference_steps.run(op, {**work.lists, **arguments, **tensors, "write_back": code})


# --- calls that are kept ----------------------------------------------------------------------------------------------

# Others may stand for tensors that the dispatcher puts in their place.
_PLAIN = {Tensor, nn.Parameter, MasterParam}
_params_of = itemgetter("params")


def _held(work: Work) -> dict[str, Any]:
    """The lists of a call, held where a compiled kernel takes just these tensors."""
    lists = work.lists.values()
    if not all(set(map(type, tensors)) <= _PLAIN and all(map(can_be_held, tensors)) for tensors in lists):
        return work.lists
    return {name: HeldTensors(tensors) if tensors else tensors for name, tensors in work.lists.items()}


class _Call:
    """A call of the step before. Its gradients are gone, what they were like is not."""

    def __init__(self, work: Work, state: Mapping[Tensor, Any], waiting: Sequence[Tensor]) -> None:
        self.work = work._replace(lists={**work.lists, "grads": []}, relaid=())
        # Whether its gradients are all that wait, in their order.
        self.takes_all = len(waiting) == len(work.members) and all(map(is_, waiting, work.members))
        self._states = [state[p] for p in work.members]
        # What of their state the call has, and how it is found there.
        self._state = [(itemgetter(key), work.lists[name]) for name, key in work.keys.items()]
        self._dtypes = work.lists["grads"][0].dtype, work.members[0].dtype
        self._strides = None if all(map(Tensor.is_contiguous, work.members)) else list(map(Tensor.stride, work.members))
        # Asked for when the call is made again.
        self._held: dict[str, Any] | None = None

    def renewed(self, grads: list[Any] | None) -> Work | None:
        """The call with other gradients, those in ``.grad`` where None are given; None where it does not hold."""
        members = self.work.members
        read = read_along(members, grads)
        if read is None or (read.tensors[0].dtype, members[0].dtype) != self._dtypes:
            return None
        # The parameters lie as the gradients do; the state may still lie as they did before.
        if (None if read.are_contiguous else list(map(Tensor.stride, members))) != self._strides:
            return None
        try:
            for of, tensors in self._state:
                if not all(map(is_, map(of, self._states), tensors)):
                    return None
        except KeyError:
            return None
        if self._held is None:
            self._held = _held(self.work)
        return self.work._replace(lists={**self._held, "grads": read})


def can_be_kept(works: Sequence[Work]) -> bool:
    """Whether compiled kernels make all of these calls on the CPU, and in no graph. On a GPU, lists that are kept would
    keep the memory of state that somebody moves elsewhere to make room; the parts of DTensors are found anew at each
    step."""
    if torch.compiler.is_compiling() or "cpu" not in extension.backends:
        return False
    return all(work.fused and work.device.type == "cpu" and not work.sharded for work in works)


class Plan:
    """The calls that one step of ``optimizer`` has made and that can be kept. Made after it; keeps no gradient, but the
    state."""

    def __init__(self, optimizer: Any, works: Sequence[Work], scaling: Scaling) -> None:
        self._told, self._objects = self._told_by(optimizer, scaling), list(self._objects_of(optimizer, scaling))
        waiting = [] if scaling.pending is None else scaling.pending.masters
        self._calls = [_Call(work, optimizer.state, waiting) for work in works]
        stepped = {p for work in works for p in work.members}
        self._idle = [p for group in optimizer.param_groups for p in group["params"] if p not in stepped]
        # What is kept beside these 16-bit weights follows what somebody writes into them.
        self._followed = [p for work in works if work.kind[0] in EXTRAS for p in work.members]
        self._versions = list(map(version_of, self._followed))

    def works(self, optimizer: Any, scaling: Scaling) -> list[Work] | None:
        """The calls of a step now; None where something has changed. No host sync."""
        if (
            self._told != self._told_by(optimizer, scaling)
            or not all(map(is_, self._objects, self._objects_of(optimizer, scaling)))
            or self._versions != list(map(version_of, self._followed))
            or not all(map(is_, map(grad_of, self._idle), repeat(None)))
        ):
            return None
        found, waiting = [], scaling.pending
        for kept in self._calls:
            grads = None
            if kept.work.kind[1] and waiting is not None:
                every = waiting.values if kept.takes_all else map(waiting.grads.__getitem__, kept.work.members)
                grads = list(every)
            if (work := kept.renewed(grads)) is None:
                return None
            found.append(work)
        return found

    def stepped(self, seen: dict[Tensor, int]) -> None:
        """Notes that a step has been taken: the versions of 16-bit weights that something is kept beside."""
        self._versions = list(map(version_of, self._followed))
        seen.update(zip(self._followed, self._versions, strict=True))

    @staticmethod
    def _told_by(optimizer: Any, scaling: Scaling) -> list[Any]:
        """What decides about where results go, besides models and dtypes, and about which state there is; and how many
        of each kind there are of the objects."""
        groups, waiting = optimizer.param_groups, scaling.pending
        counts = len(optimizer.state), len(scaling.models), 0 if waiting is None else len(waiting.masters)
        lists, sizes = map(optimizer._state_lists, groups), map(len, map(_params_of, groups))
        return [*optimizer._write_backs(), *lists, *sizes, *counts]

    @staticmethod
    def _objects_of(optimizer: Any, scaling: Scaling) -> Iterator[Any]:
        """What must be the same objects, in this order."""
        groups, state, models = optimizer.param_groups, optimizer.state, scaling.models
        waiting = () if scaling.pending is None else scaling.pending.masters
        return chain(groups, *map(_params_of, groups), state, state.values(), models, models.values(), waiting)
