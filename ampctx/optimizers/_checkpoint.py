"""Takes a saved optimizer state over for the parameters of an optimizer that exists; and what a copy takes along.

torch's ``load_state_dict`` casts floating state to the parameter's dtype, which would round the fp32 state of a 16-bit
parameter. Here each tensor gets the dtype and the memory layout that the ops read it in.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampctx._errors import AmpKeyError, AmpTypeError, AmpValueError
from ampctx.kernels.reference import compute_dtype
from ampctx.kernels.spec import SPECS
from ampctx.optimizers._options import Group
from ampctx.optimizers._state import EXTRAS, State

# State of the size of its parameter, in any of the optimizers, unless one keeps it in one element.
SIZED = {*(state.key for spec in SPECS.values() for state in spec.states), *EXTRAS.values()}
# State that is there as a whole, or not at all.
MOMENTS = ("exp_avg", "exp_avg_sq")


class SavedGroup(NamedTuple):
    """One param group of a checkpoint beside the one it is for; ``states`` are (parameter, its name, its state)."""

    saved: Group
    states: list[tuple[Tensor, str, State]]


def matched(
    checkpoint: Mapping[str, Any], groups: list[Group], name: Callable[[int, int], str]
) -> list[SavedGroup] | None:
    """The groups of a checkpoint, copied, with the states that belong to them. None where the checkpoint does not fit,
    which is for torch to say."""
    saved_groups, states = checkpoint.get("param_groups"), checkpoint.get("state")
    if not isinstance(saved_groups, list) or not isinstance(states, Mapping):
        return None
    if [len(g["params"]) for g in saved_groups] != [len(g["params"]) for g in groups]:
        return None
    return [
        SavedGroup(
            dict(saved),
            [
                (p, name(g, i), {k: v for k, v in states[key].items() if v is not None})
                for i, (key, p) in enumerate(zip(saved["params"], group["params"], strict=True))
                if key in states
            ],
        )
        for g, (saved, group) in enumerate(zip(saved_groups, groups, strict=True))
    ]


def _ids(groups: list[Group]) -> Iterator[Any]:
    for group in groups:
        yield from group["params"]


def leftover(checkpoint: Mapping[str, Any]) -> dict[Any, Any]:
    """State that belongs to no parameter: carried along as it is."""
    ids = set(_ids(checkpoint["param_groups"]))
    return {k: v for k, v in checkpoint["state"].items() if k not in ids}


def take_step_from_group(group: SavedGroup) -> None:
    """apex counts the steps of a group; here each parameter counts its own."""
    step = group.saved.pop("step", None)
    if step is not None:
        for _, _, state in group.states:
            state.setdefault("step", step)


def check_complete(name: str, state: State, keys: list[str]) -> None:
    """Raises where the state has one of the moments among ``keys`` and not another, which would begin at 0 unseen."""
    needed = [key for key in MOMENTS if key in keys]
    missing = [key for key in needed if key not in state]
    if 0 < len(missing) < len(needed):
        raise AmpKeyError(f"the state of {name} has no {missing[0]!r}, only {sorted(map(str, state))}")


def restored(p: Tensor, name: str, state: State, one_element: Collection[str], dropped: Collection[str]) -> State:
    """A copy of ``state`` for parameter ``p``, on its device; tensors of its size in its layout, in the state's dtype.

    Args:
        one_element: keys that hold one number, which become 0-d fp32 tensors.
        dropped: keys that have no use.

    Raises:
        AmpValueError: a tensor of another size, or a number in its place; a negative step; by name.
        AmpTypeError: something else in the place of one number.
    """
    result: State = {}
    for key, value in state.items():
        if key in dropped:
            continue
        where = f"the state {key!r} of {name}"
        if key in one_element:
            result[key] = _number(value, where, p)
            # Of what was given, which is on the CPU most of the time.
            if key == "step" and not value >= 0:
                raise AmpValueError(f"{where} is {float(value)!r}, expected a count")
        elif isinstance(value, Tensor) and value.shape == p.shape:
            result[key] = torch.empty_like(p, dtype=_dtype(key, value, p), requires_grad=False).copy_(value)
        elif isinstance(value, Tensor) and (key in SIZED or (value.is_floating_point() and value.numel() > 1)):
            raise AmpValueError(f"{where} has shape {tuple(value.shape)}, the parameter has {tuple(p.shape)}")
        elif key in SIZED:
            raise AmpValueError(f"{where} is of type {type(value).__name__}, expected a tensor")
        else:
            result[key] = value.to(p.device, copy=True) if isinstance(value, Tensor) else value
    return result


def _number(value: Any, where: str, p: Tensor) -> Tensor:
    if not isinstance(value, Tensor):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise AmpTypeError(f"{where} is of type {type(value).__name__}, expected a number")
        return torch.tensor(float(value), dtype=torch.float32, device=p.device)
    if value.numel() != 1:
        raise AmpValueError(f"{where} has {value.numel()} elements, expected 1")
    return value.to(device=p.device, dtype=torch.float32, copy=True).reshape(())


def _dtype(key: str, value: Tensor, p: Tensor) -> torch.dtype:
    if not value.is_floating_point():
        return value.dtype
    return p.dtype if key == "compensation" else compute_dtype(p)


def without_amp(optimizer: Any) -> dict[str, Any]:
    """The attributes of an optimizer that a copy or a pickle takes along.

    Methods that an LR scheduler or amp replaced on the instance stay behind, and so does what amp has put on it and
    marked with an attribute ``of_amp``: they lead to the original.
    """
    return {
        name: value
        for name, value in vars(optimizer).items()
        if not (callable(value) and hasattr(type(optimizer), name)) and not getattr(value, "of_amp", False)
    }
