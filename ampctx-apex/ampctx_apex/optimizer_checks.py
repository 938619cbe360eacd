"""Checks of a saved optimizer state before loading."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ampctx import AmpKeyError, AmpTypeError, AmpValueError
from ampctx.spi import SIZED, FusedOptimizer, plain

# Options that torch's optimizers have had since their first version and read in step.
_REQUIRED = frozenset({"lr", "betas", "eps", "weight_decay", "momentum", "dampening", "lr_decay", "alpha", "rho"})
# torch optimizers whose state needs both moments.
_TWO_MOMENTS = (torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam, torch.optim.SparseAdam)


def check_container(state: Any, where: str) -> None:
    """Checks the layout of ``torch.optim.Optimizer.state_dict()``.

    Raises:
        AmpTypeError, AmpKeyError, AmpValueError: an entry has the wrong form. The message names it, below ``where``.
    """
    if not isinstance(state, Mapping):
        raise AmpTypeError(f"{where} is of type {type(state).__name__}, expected a dict")
    for name in ("state", "param_groups"):
        if name not in state:
            raise AmpKeyError(f'{where} has no "{name}", it has {", ".join(map(repr, state)) or "no entries"}')
    groups, states = state["param_groups"], state["state"]
    if not isinstance(groups, (list, tuple)):
        raise AmpTypeError(f'{where}["param_groups"] is of type {type(groups).__name__}, expected a list')
    if not isinstance(states, Mapping):
        raise AmpTypeError(f'{where}["state"] is of type {type(states).__name__}, expected a dict')
    seen: set[Any] = set()
    for g, group in enumerate(groups):
        at = f'{where}["param_groups"][{g}]'
        if not isinstance(group, Mapping):
            raise AmpTypeError(f"{at} is of type {type(group).__name__}, expected a dict")
        if "params" not in group:
            raise AmpKeyError(f'{at} has no "params", it has {", ".join(map(repr, group)) or "no entries"}')
        params = group["params"]
        if not isinstance(params, (list, tuple)) or not all(isinstance(key, (int, str)) for key in params):
            raise AmpTypeError(f'{at}["params"] is no list of numbers or names')
        for key in params:
            if key in seen:
                raise AmpValueError(f'{at}["params"] has {key!r}, which stands for another parameter already')
            seen.add(key)
    for key, entry in states.items():
        if key in seen and not isinstance(entry, Mapping):
            raise AmpTypeError(f'{where}["state"][{key!r}] is of type {type(entry).__name__}, expected a dict')


def check_contents(optimizer: Any, inside: Any, state: Mapping[str, Any]) -> None:
    """Checks options and states that would fail in a later step.

    ``inside``: the optimizer inside LARC, else ``optimizer``. Its groups have the sizes of the state's.

    Raises:
        AmpKeyError: an option or moment is missing. AmpTypeError, AmpValueError: one is invalid, or a tensor's size
            differs from its parameter's.
    """
    ours = isinstance(inside, FusedOptimizer)
    for g, (group, own) in enumerate(zip(state["param_groups"], optimizer.param_groups, strict=True)):
        _check_options(group, own, f"param_groups[{g}]", ours)
        for i, (key, p) in enumerate(zip(group["params"], own["params"], strict=True)):
            saved, name = state["state"].get(key, {}), f"param_groups[{g}]['params'][{i}]"
            if "step" in saved:
                _check_step(saved["step"], f"the state 'step' of {name}")
            if not ours:
                _check_entries(saved, inside.state.get(p, {}), p, name)
                _check_moments(inside, saved, name)


def _check_options(group: Mapping[str, Any], own: Mapping[str, Any], where: str, ours: bool) -> None:
    for name in sorted(own.keys() & ({"lr"} if ours else _REQUIRED)):
        if name not in group:
            raise AmpKeyError(f"{where} of the checkpoint has no {name!r}")
        # ampctx's optimizers check their options themselves.
        if not ours and not _is_like(group[name], own[name]):
            raise AmpTypeError(f"{where}[{name!r}] of the checkpoint is {group[name]!r}, expected {_like(own[name])}")
    if group.get("step") is not None:
        _check_step(group["step"], f"{where}['step'] of the checkpoint")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_like(value: Any, own: Any) -> bool:
    if isinstance(own, (tuple, list)):
        return isinstance(value, (tuple, list)) and len(value) == len(own) and all(map(_is_like, value, own))
    return not (_is_number(own) or isinstance(own, Tensor)) or _is_number(plain(value))


def _like(own: Any) -> str:
    return f"{len(own)} numbers" if isinstance(own, (tuple, list)) else "a number"


def _check_step(value: Any, where: str) -> None:
    number = plain(value)
    if not _is_number(number):
        raise AmpTypeError(f"{where} is of type {type(number).__name__}, expected a number")
    if not 0 <= number < math.inf:
        raise AmpValueError(f"{where} is {number!r}, expected a count")


def _check_entries(saved: Mapping[str, Any], own: Mapping[str, Any], p: Tensor, where: str) -> None:
    for name, value in saved.items():
        # torch's SGD without momentum has None.
        if name == "step" or value is None:
            continue
        if (name in SIZED or isinstance(own.get(name), Tensor)) and not isinstance(value, Tensor):
            raise AmpTypeError(f"the state {name!r} of {where} is of type {type(value).__name__}, expected a tensor")
        if name in SIZED and value.shape not in (p.shape, ()):
            raise AmpValueError(
                f"the state {name!r} of {where} has shape {tuple(value.shape)}, the parameter has {tuple(p.shape)}"
            )


def _check_moments(inside: Any, saved: Mapping[str, Any], where: str) -> None:
    missing = [name for name in ("exp_avg", "exp_avg_sq") if saved.get(name) is None]
    if isinstance(inside, _TWO_MOMENTS) and saved and missing:
        raise AmpKeyError(f"the state of {where} has no {missing[0]!r}, only {sorted(map(str, saved))}")
