"""From the members of a param group to calls of an op: targets, layouts, buckets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampctx.kernels import reference_steps
from ampctx.kernels import steps as optimizer_ops
from ampctx.kernels.grouping import buckets
from ampctx.kernels.ops import factor
from ampctx.kernels.reference import KERNEL_DTYPES, is_dense, same_layout
from ampctx.kernels.reference_steps import WRITE_BACKS
from ampctx.kernels.sharding import local
from ampctx.optimizers._options import Group
from ampctx.optimizers._scaling import Scaling

_KNOWN_DTYPES = (*KERNEL_DTYPES, torch.int16)
_FACTORS = ("inv_scale", "lr", "global_grad_norm")
# Where 16-bit parameters keep what goes with them, by destination.
EXTRAS = {"copy": "master_param", "split": "remainder", "kahan": "compensation"}

State = dict[str, Any]


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

    @property
    def write_back(self) -> str:
        return "copy" if self.kind[0] == "model" else self.kind[0]

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
    group: Group,
    kind: Kind,
    members: Members,
    states: list[State],
    sized: Mapping[str, str | None],
    one_element: Mapping[str, str],
    scaling: Scaling,
) -> Iterator[Work]:
    """The op calls that step ``members``, one for each device and combination of dtypes.

    Args:
        states: of the members.
        sized: the op's lists of state of the parameters' size, and under which key that is; None for an empty list.
        one_element: the same for state of one element.
    """
    destination = kind[0]
    # Parts of DTensors: their layout in memory is their own.
    params, extras = map(local, _targets(members.params, states, destination, scaling))
    compared = {
        "grads": [
            grad if grad.is_contiguous() and p.is_contiguous() else _in_layout_of(p, grad)
            for p, grad in zip(params, local(members.grads), strict=True)
        ],
        "params": params,
        **{name: [state[key] for state in states] for name, key in sized.items() if key is not None},
        **({"extras": extras} if extras else {}),
    }
    along = {name: [state[key] for state in states] for name, key in one_element.items()}
    empty: dict[str, list[Tensor]] = {name: [] for name in ("extras", *sized)}
    names = [*compared, *along]
    keys = {**{name: key for name, key in sized.items() if key is not None}, **one_element}
    if destination in EXTRAS:
        keys["params" if destination == "copy" else "extras"] = EXTRAS[destination]
    found = buckets(*compared.values(), along=[*along.values(), members.params], known_dtypes=_KNOWN_DTYPES)
    for device, fused, (*lists, stepped) in found:
        yield Work(group, kind, device, fused, stepped, {**empty, **dict(zip(names, lists, strict=True))}, keys)


def call(op: str, work: Work, arguments: dict[str, Any]) -> None:
    """``ampctx.optimizer_ops``'s ``op`` on the lists of ``work``, or its reference where no kernel takes them."""
    if work.fused:
        getattr(optimizer_ops, op)(**work.lists, **arguments, write_back=work.write_back)
    else:
        tensors = {name: factor(value) for name, value in arguments.items() if name in _FACTORS}
        code = WRITE_BACKS.index(work.write_back)
        getattr(reference_steps, op)(**work.lists, **{**arguments, **tensors}, write_back=code)
