"""Keeps the op calls of a step for the next one, while everything that they were made from is still the same.

Between two steps the gradients are new and the rest is not. To make the calls anew takes a dozen passes over the
parameters in Python; to see that they still hold takes a few inside the interpreter (``ampctx._each``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from ampctx._each import all_none, all_there, dtype_of, grad_of, layout_of, same, version_of
from ampctx.model_grads import MasterParam
from ampctx.ops import HeldTensors, can_be_held, extension
from ampctx.optimizers._scaling import Scaling
from ampctx.optimizers._work import EXTRAS, Work

# Others may stand for tensors that the dispatcher puts in their place.
_PLAIN = {Tensor, nn.Parameter, MasterParam}


def _strides(tensors: Sequence[Tensor]) -> list[tuple[int, ...]] | None:
    """None where all are contiguous."""
    return None if all(map(Tensor.is_contiguous, tensors)) else [t.stride() for t in tensors]


def _held(work: Work) -> dict[str, Any]:
    """The lists of a call, held where a compiled kernel takes just these tensors."""
    lists = work.lists.values()
    plain = all(set(map(type, tensors)) <= _PLAIN and all(map(can_be_held, tensors)) for tensors in lists)
    if not (work.fused and work.device.type in extension.backends and plain):
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
        grads = work.lists["grads"]
        self.work = work._replace(lists={**work.lists, "grads": []})
        self._states = [state[p] for p in work.members]
        self._dtypes = grads[0].dtype, work.members[0].dtype
        self._strides = _strides(grads), _strides(work.members)
        # Asked for when the call is made again.
        self._held: dict[str, Any] | None = None

    def renewed(self, grads: list[Any]) -> Work | None:
        """The call with other gradients, of which None may be one; None where it does not hold any more."""
        work, (of_grads, of_members) = self.work, self._dtypes
        if (
            not all_there(grads)
            or set(map(dtype_of, grads)) != {of_grads}
            or set(map(layout_of, grads)) != {torch.strided}
            or set(map(dtype_of, work.members)) != {of_members}
            or (_strides(grads), _strides(work.members)) != self._strides
        ):
            return None
        try:
            if not all(same(map(itemgetter(key), self._states), work.lists[name]) for name, key in work.keys.items()):
                return None
        except KeyError:
            return None
        if self._held is None:
            self._held = _held(work)
        return work._replace(lists={**self._held, "grads": grads})


class Plan:
    """The calls that one step of ``optimizer`` has made. Made after that step; keeps no gradient, but the state."""

    def __init__(self, optimizer: Any, works: Sequence[Work], scaling: Scaling) -> None:
        self._destinations = self._destinations_of(optimizer)
        self._groups = [(group, list(group["params"])) for group in optimizer.param_groups]
        self._state, self._models = _Snapshot(optimizer.state), _Snapshot(scaling.models)
        self._calls = [_Call(work, optimizer.state) for work in works]
        stepped = {p for work in works for p in work.members}
        self._idle = [p for _, params in self._groups for p in params if p not in stepped]
        self._waiting = [] if scaling.pending is None else list(scaling.pending.grads)
        # What is kept beside these 16-bit weights follows what somebody writes into them.
        self._followed = [p for work in works if work.kind[0] in EXTRAS for p in work.members]
        self._versions = list(map(version_of, self._followed))

    def works(self, optimizer: Any, scaling: Scaling) -> list[Work] | None:
        """The calls of a step now; None where something has changed. No host sync."""
        pending = {} if scaling.pending is None else scaling.pending.grads
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
            members = call.work.members
            if not call.work.waiting:
                grads = list(map(grad_of, members))
            elif len(members) == len(pending) and same(members, pending):
                grads = list(pending.values())
            else:
                grads = list(map(pending.get, members))
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
