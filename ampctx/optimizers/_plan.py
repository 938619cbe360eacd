"""Keeps the op calls of a step for the next one, while everything that they were made from is still the same.

Between two steps the gradients are new and the rest is not. To make the calls anew takes a dozen passes over the
parameters in Python; to see that they still hold takes a few in C (``ampctx.kernels.each``, ``ampctx.ops.read_along``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from torch import Tensor, nn

from ampctx.kernels.each import all_none, grad_of, same, version_of
from ampctx.kernels.ops import HeldTensors, can_be_held, extension, read_along
from ampctx.kernels.sharding import any_sharded
from ampctx.masters.lazy_grads import MasterParam
from ampctx.optimizers._scaling import Scaling
from ampctx.optimizers._work import EXTRAS, Work

# Others may stand for tensors that the dispatcher puts in their place.
_PLAIN = {Tensor, nn.Parameter, MasterParam}


def _held(work: Work) -> dict[str, Any]:
    """The lists of a call, held where a compiled kernel takes just these tensors."""
    lists = work.lists.values()
    if not all(set(map(type, tensors)) <= _PLAIN and all(map(can_be_held, tensors)) for tensors in lists):
        return work.lists
    return {name: HeldTensors(tensors) if tensors else tensors for name, tensors in work.lists.items()}


class _Snapshot:
    """What a mapping held: the same objects, in the same order."""

    def __init__(self, mapping: Mapping[Any, Any]) -> None:
        self._keys, self._values = list(mapping), list(mapping.values())

    def is_of(self, mapping: Mapping[Any, Any]) -> bool:
        return len(mapping) == len(self._keys) and same(mapping, self._keys) and same(mapping.values(), self._values)


class _Call:
    """A call of the step before. Its gradients are gone, what they were like is not."""

    def __init__(self, work: Work, state: Mapping[Tensor, Any]) -> None:
        self.work = work._replace(lists={**work.lists, "grads": []})
        self._states = [state[p] for p in work.members]
        self._dtypes = work.lists["grads"][0].dtype, work.members[0].dtype
        self._strides = None if all(map(Tensor.is_contiguous, work.members)) else list(map(Tensor.stride, work.members))
        # Asked for when the call is made again.
        self._held: dict[str, Any] | None = None

    def renewed(self, grads: list[Any] | None) -> Work | None:
        """The call with other gradients, those in ``.grad`` where None are given; None where it does not hold."""
        work = self.work
        read = read_along(work.members, grads)
        if read is None or (read.dtype, work.members[0].dtype) != self._dtypes:
            return None
        # The parameters lie as the gradients do; the state may still lie as they did before.
        if (None if read.are_contiguous else list(map(Tensor.stride, work.members))) != self._strides:
            return None
        try:
            if not all(same(map(itemgetter(key), self._states), work.lists[name]) for name, key in work.keys.items()):
                return None
        except KeyError:
            return None
        if self._held is None:
            self._held = _held(work)
        return work._replace(lists={**self._held, "grads": read})


def can_be_kept(works: Sequence[Work]) -> bool:
    """Whether compiled kernels make all of these calls on the CPU. On a GPU, lists that are kept would keep the memory
    of state that somebody moves elsewhere to make room; the parts of DTensors are found anew at each step."""
    return "cpu" in extension.backends and all(
        work.fused and work.device.type == "cpu" and not any_sharded(work.members) for work in works
    )


class Plan:
    """The calls that one step of ``optimizer`` has made and that can be kept. Made after it; keeps no gradient, but the
    state."""

    def __init__(self, optimizer: Any, works: Sequence[Work], scaling: Scaling) -> None:
        self._destinations = self._destinations_of(optimizer)
        self._groups = [(group, list(group["params"])) for group in optimizer.param_groups]
        self._state, self._models = _Snapshot(optimizer.state), _Snapshot(scaling.models)
        self._calls = [_Call(work, optimizer.state) for work in works]
        stepped = {p for work in works for p in work.members}
        self._idle = [p for _, params in self._groups for p in params if p not in stepped]
        self._waiting = [] if scaling.pending is None else scaling.pending.masters
        # What is kept beside these 16-bit weights follows what somebody writes into them.
        self._followed = [p for work in works if work.kind[0] in EXTRAS for p in work.members]
        self._versions = list(map(version_of, self._followed))

    def works(self, optimizer: Any, scaling: Scaling) -> list[Work] | None:
        """The calls of a step now; None where something has changed. No host sync."""
        pending = [] if scaling.pending is None else scaling.pending.masters
        if (
            not self._are_these(optimizer.param_groups)
            or self._destinations != self._destinations_of(optimizer)
            or not self._state.is_of(optimizer.state)
            or not self._models.is_of(scaling.models)
            or self._versions != list(map(version_of, self._followed))
            or len(pending) != len(self._waiting)
            or not same(pending, self._waiting)
            or not all_none(map(grad_of, self._idle))
        ):
            return None
        found = []
        for call in self._calls:
            members, grads = call.work.members, None
            if call.work.waiting and scaling.pending is not None:
                alone = len(members) == len(pending) and same(members, pending)
                waiting = scaling.pending
                grads = list(waiting.values if alone else map(waiting.grads.__getitem__, members))
            if (work := call.renewed(grads)) is None:
                return None
            found.append(work)
        return found

    def stepped(self) -> None:
        """Notes that a step has been taken: the versions of 16-bit weights that something is kept beside."""
        self._versions = list(map(version_of, self._followed))

    def _are_these(self, groups: Sequence[dict[str, Any]]) -> bool:
        return len(groups) == len(self._groups) and all(
            group is there and len(params) == len(group["params"]) and same(params, group["params"])
            for group, (there, params) in zip(groups, self._groups, strict=True)
        )

    @staticmethod
    def _destinations_of(optimizer: Any) -> list[Any]:
        """What decides about where results go, besides models and dtypes, and about which state there is."""
        return [*optimizer._write_backs(), *map(optimizer._state_lists, optimizer.param_groups)]
