"""Loads saved optimizer state into an existing optimizer, and selects the attributes for copies.

torch's ``load_state_dict`` casts floating state to the parameter's dtype, which would round the fp32 state of a 16-bit
parameter. This module gives each tensor the dtype and memory layout that the ops need.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampctx._errors import AmpError, AmpKeyError, AmpTypeError, AmpValueError, listed
from ampctx._saved import check_format, entry, plain, typed
from ampctx.kernels.reference import compute_dtype
from ampctx.kernels.sharding import local
from ampctx.kernels.spec import OPTIMIZERS, OpSpec
from ampctx.kernels.tensor_loops import has_values
from ampctx.optimizers import _state_types
from ampctx.optimizers._options import Group, fill_lr_tensors, param_name
from ampctx.optimizers._state_types import CODED, CODES_OF, DAMAGED, SCALES_OF, State
from ampctx.scaling.loss_scale import check_count
from ampctx.weights.store import EXTRAS

logger = logging.getLogger("ampctx")

SKIPPED = "skipped_steps"  # a guard's count, an option of its groups
# The state keys of all optimizers. Of the parameter's size, unless an optimizer keeps one element.
SIZED = {*(state.key for spec in OPTIMIZERS.values() for state in spec.states), *EXTRAS.values()}
OWN = {*EXTRAS.values(), *CODES_OF, *SCALES_OF}  # neither torch's nor apex's
KEPT = {*SIZED.difference(EXTRAS.values()), *CODES_OF, *SCALES_OF}
# Keys, and what the lowest and the highest of their values may be. The first row with a key counts.
_VALUES: list[tuple[Collection[str], str, Callable[[float, float], bool]]] = [
    (SCALES_OF, "finite numbers >= 0", lambda low, high: low >= 0 and math.isfinite(high)),
    (CODES_OF, "codes from -127 to 127", lambda low, high: low >= -127),
    ({"step"}, "a count", lambda low, high: 0 <= low < math.inf and low == int(low)),
    # Sums and averages of squares, and norms. inf is an overflow.
    ({"exp_avg_sq", "max_exp_avg_sq", "sum"}, "numbers >= 0", lambda low, high: low >= 0),
    (KEPT, "finite numbers", lambda low, high: math.isfinite(low) and math.isfinite(high)),
]


class SavedGroup(NamedTuple):
    """A param group of a checkpoint, and the own one. ``states``: (own parameter, its name, saved state)."""

    saved: Group
    states: list[tuple[Tensor, str, State]]
    own: Group


def matched(checkpoint: Mapping[str, Any], groups: list[Group]) -> list[SavedGroup] | None:
    """Copies the groups of a checkpoint, with their states. None if groups do not fit: torch raises then. Refuses
    missing entries, entries of the wrong type, and ambiguous ids."""
    if "param_groups" not in checkpoint:
        return None
    check_format(checkpoint, "state_dict", ("state", "param_groups", "format"))
    saved_groups = entry(checkpoint, "param_groups", (list, tuple), "state_dict")
    states = entry(checkpoint, "state", Mapping, "state_dict")
    for g, saved in enumerate(saved_groups):
        typed(saved, Mapping, f'state_dict["param_groups"][{g}]')
        entry(saved, "params", (list, tuple), f'state_dict["param_groups"][{g}]')
        check_count(f'state_dict["param_groups"][{g}]["{SKIPPED}"]', plain(saved.get(SKIPPED, 0)), 0)
    if [len(g["params"]) for g in saved_groups] != [len(g["params"]) for g in groups]:
        return None
    found, stands_for = [], dict[Any, Tensor]()
    for g, (saved, group) in enumerate(zip(saved_groups, groups, strict=True)):
        entries: list[tuple[Tensor, str, State]] = []
        for i, (key, p) in enumerate(zip(saved["params"], group["params"], strict=True)):
            name = param_name(groups, g, i)
            # torch repeats an id only if a group has a parameter twice.
            if stands_for.setdefault(key, p) is not p:
                raise AmpValueError(
                    f"the checkpoint has {key!r} for {name}, and for another parameter before it. One of them would "
                    "get the state of the other. Save the optimizer's state_dict() again."
                )
            if key in states:
                typed(states[key], Mapping, f"the state of {name}")
                entries.append((p, name, {k: value for k, value in states[key].items() if value is not None}))
        found.append(SavedGroup(dict(saved), entries, group))
    return found


def load_between(
    optimizer: Any, load: Callable[[Any], Any], state_dict: Any, before: Callable[..., Any], after: Callable[..., Any]
) -> None:
    """Calls torch's ``load``. ``before`` is the last hook before its own work and ``after`` the first after it, so that
    the user's hooks see complete states."""
    with ExitStack() as hooks:
        hooks.callback(optimizer.register_load_state_dict_pre_hook(before).remove)
        hooks.callback(optimizer.register_load_state_dict_post_hook(after, prepend=True).remove)
        load(state_dict)


def load_fused(optimizer: Any, load: Callable[[Any], Any], state_dict: Any) -> None:
    """Loads a state dict into a fused optimizer, by torch's ``load``."""
    states: dict[Tensor, State] = {}
    rates = [group["lr"] for group in optimizer.param_groups]

    def before(_: Any, given: dict[str, Any]) -> dict[str, Any] | None:
        found = matched(given, optimizer.param_groups)
        if found is None:
            return None
        with torch.no_grad():
            states.update(_restored_groups(optimizer, found))
        return {**given, "param_groups": [g.saved for g in found], "state": leftover(given)}

    def after(_: Any) -> None:
        optimizer.state.update(states)
        optimizer._restore()
        fill_lr_tensors(optimizer, rates)

    load_between(optimizer, load, state_dict, before, after)


def _restored_groups(optimizer: Any, groups: list[SavedGroup]) -> dict[Tensor, State]:
    result, names = {}, {}
    for g, group in enumerate(groups):
        optimizer._adapt_checkpoint(group)
        spec, kept = OPTIMIZERS[optimizer._op_of(group.saved)], _state_types.DEFAULTS
        one_element = {state.key for state in spec.one_element}
        for name in kept:  # how to keep state is a choice of this run
            group.saved.pop(name, None)
        group.saved.update({name: value for name, value in group.own.items() if name in kept})
        if not group.own["params"]:  # torch's distributed checkpoints drop its options
            group.saved.update({**group.own, **group.saved})
        # Missing flags keep the optimizer's values.
        for name in ("lr", *optimizer._saved_options(group.saved)):
            entry(group.saved, name, object, f'state_dict["param_groups"][{g}]')
        # Adds defaults here, because __setstate__ runs after the checks.
        for name, default in optimizer.defaults.items():
            group.saved.setdefault(name, default)
        try:
            optimizer._check_options(group.saved)
        except AmpError as error:
            raise type(error)(f"param_groups[{g}] of the checkpoint: {error}") from None
        for p, name, state in group.states:
            names[p] = name
            check_complete(spec, type(optimizer).__name__, name, state, group.saved)
            result[p] = restored(p, name, state, one_element, optimizer._useless_state(p))
    check_values(result, names)
    for group in groups:
        for p, _, _ in group.states:
            _state_types.convert(p, result[p], _state_types.forms_in(optimizer, p, group.saved))
    return result


def leftover(checkpoint: Mapping[str, Any]) -> dict[Any, Any]:
    """The entries of the state that belong to no parameter, unchanged. Refuses the state of a parameter that no group
    has: it would be lost."""
    ids = {key for group in checkpoint["param_groups"] for key in group["params"]}
    found = {key: value for key, value in checkpoint["state"].items() if key not in ids}
    for key, value in found.items():
        if isinstance(value, Mapping) and not KEPT.isdisjoint(value):
            raise AmpKeyError(
                f"the checkpoint has state for {key!r} ({type(key).__name__}), and no param group has a parameter of "
                f"that name: {listed(ids, 8)}. This state would be lost."
            )
    return found


def check_complete(spec: OpSpec, optimizer: str, name: str, state: State, group: Group) -> None:
    """Raises AmpKeyError for the state of another optimizer, or a partial state: the rest would silently start at 0."""
    known = {kept.key for kept in spec.states}
    known |= {key for kept in spec.coded for key in (kept.codes_key, kept.scales)}
    if unknown := sorted(state.keys() - known - KEPT - OWN - {"step"}, key=str):
        logger.warning("%s: the state of %s has %s, which no step reads.", optimizer, name, listed(unknown))
    foreign = sorted(KEPT.intersection(state).difference(known))
    if foreign:
        raise AmpKeyError(
            f"the state of {name} has {foreign[0]!r}, which {optimizer} does not keep. It is the state of another "
            "optimizer. Load it into the class that saved it, or start without it."
        )
    if not state.keys() & {*known, "step"}:
        return
    for kept in spec.states:
        # SGD has a buffer only after a first step with momentum.
        needed = kept.if_set != "momentum" and (not kept.if_set or group[kept.if_set])
        has_codes = bool(kept.code) and not state.keys().isdisjoint((kept.codes_key, kept.scales))
        if needed and kept.key not in state and not has_codes:
            raise AmpKeyError(f"the state of {name} has no {kept.key!r}, only {listed(state, 8)}. It would start at 0.")
    if "step" in state or not any(number.name == "bias_correction" for number in spec.numbers):
        return
    # A count of 0 is right if all of the state is 0.
    if any(isinstance(t, Tensor) and has_values(t) and bool(t.any()) for t in state.values()):
        raise AmpKeyError(
            f"the state of {name} has no 'step', only {listed(state, 8)}. Bias correction would start again. Put the "
            "number of steps there, or into its param group as 'step'."
        )


def saved(optimizer: Any, found: dict[str, Any]) -> Any:
    """Completes the state dict that torch has made of an optimizer."""
    # A hook of the program may have put an entry there that is no dict.
    is_own = any(isinstance(state, dict) and not OWN.isdisjoint(state) for state in found["state"].values())
    return optimizer._saved({**found, "state": _state_types.for_any_ranks(found["state"])}, is_own)


def refuse_strays(optimizer: Any) -> None:
    """AmpKeyError for state of a parameter that has left the groups: torch raises KeyError with an id."""
    members = {p for group in optimizer.param_groups for p in group["params"]}
    for p in optimizer.state:
        if isinstance(p, Tensor) and p not in members:
            raise AmpKeyError(
                f"{type(optimizer).__name__} has state of a parameter of shape {tuple(p.shape)} that is in no group. "
                "Move it to the one in its place, optimizer.state[new] = optimizer.state.pop(old), or delete it."
            )


def restored(p: Tensor, name: str, state: State, one_element: Collection[str], dropped: Collection[str]) -> State:
    """Copies ``state`` to the device of ``p``, with tensors of its size in its layout. Refuses other sizes and dtypes.
    ``one_element``: keys of one number, which become 0-d fp32 tensors. ``dropped``: keys to leave out."""
    result: State = {}
    for key, value in state.items():
        if key in dropped:
            continue
        if (of := CODES_OF.get(key, SCALES_OF.get(key))) is not None:
            # Together, at the first of the two.
            if result.keys().isdisjoint((of, CODED[of].codes_key)):
                result.update(_state_types.restored(p, name, of, state))
            continue
        where = f"the state {key!r} of {name}"
        if isinstance(value, Tensor) and value.is_meta and not p.is_meta:
            raise AmpValueError(f"{where} is on the meta device, without values")
        if key in one_element:
            result[key] = _number(value, where, p)
            continue
        if key in SIZED:
            _state_types.check_tensor(where, value, p.shape, torch.int16 if key == "remainder" else None, p.is_meta)
        if isinstance(value, Tensor) and value.shape == p.shape and value.layout == torch.strided:
            dtype = p.dtype if key == "compensation" else compute_dtype(p)
            # bf16 state stays as it is, until the optimizer converts it.
            if not value.is_floating_point() or (key in CODED and value.dtype == torch.bfloat16):
                dtype = value.dtype
            result[key] = torch.empty_like(p, dtype=dtype, requires_grad=False).copy_(value)
        elif isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 1:
            raise AmpValueError(f"{where} has shape {tuple(value.shape)}, the parameter has {tuple(p.shape)}")
        else:
            result[key] = value.to(p.device, copy=True) if isinstance(value, Tensor) else value
    return result


def check_values(states: Mapping[Tensor, State], names: Mapping[Tensor, str]) -> None:
    """Refuses values that no run produces, by name. One host sync for each device."""
    looked_at: dict[torch.device, list[tuple[str, Tensor, Tensor]]] = {}
    for p, state in states.items():
        for key in (*KEPT.intersection(state), *{"step"}.intersection(state)):
            # Each rank checks its part of a DTensor.
            (value,) = local([state[key]])
            if value.numel() and has_values(value):
                looked_at.setdefault(value.device, []).append((key, p, value))
    for found in looked_at.values():
        wide = torch.float64 if any(value.dtype == torch.float64 for _, _, value in found) else torch.float32
        ends = [torch.stack(torch.aminmax(value.detach())).to(wide) for _, _, value in found]
        for (key, p, _), (low, high) in zip(found, torch.stack(ends).tolist(), strict=True):
            expected, fits = next((what, fits) for keys, what, fits in _VALUES if key in keys)
            if not fits(low, high):
                wrong = high if fits(low, low) else low
                raise AmpValueError(f"the state {key!r} of {names[p]} has {wrong:g}, expected {expected}: {DAMAGED}")


def _number(value: Any, where: str, p: Tensor) -> Tensor:
    if not isinstance(value, Tensor):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise AmpTypeError(f"{where} is of type {type(value).__name__}, expected a number")
        try:
            return torch.tensor(float(value), dtype=torch.float32, device=p.device)
        except OverflowError:
            raise AmpValueError(f"{where} is too large for a float, expected a count") from None
    if value.numel() != 1:
        raise AmpValueError(f"{where} has {value.numel()} elements, expected 1")
    if value.is_complex() or value.dtype == torch.bool or value.layout != torch.strided:
        raise AmpTypeError(f"{where} is a tensor of {value.dtype} and {value.layout}, expected a number")
    return value.detach().to(device=p.device, dtype=torch.float32, copy=True).reshape(())


def without_amp(optimizer: Any, *transient: str) -> dict[str, Any]:
    """The attributes of an optimizer for a copy or a pickle, without ``transient`` ones, torch's hooks, methods that an
    LR scheduler or amp has replaced, and objects that amp has marked ``of_amp``: these refer to the original."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in transient
        and not (name.startswith("_optimizer_") and name.endswith("_hooks"))
        and not (callable(value) and hasattr(type(optimizer), name))
        and not getattr(value, "of_amp", False)
    }


def first_state_of(optimizer: Any, p: Tensor, group: Mapping[str, Any]) -> State:
    """The state that a first step makes, with values of no meaning. Of torch's optimizers a twin takes a step of zeros.
    It raises where one needs more."""
    if hasattr(type(optimizer), "first_state"):
        own: State = optimizer.first_state(p, dict(group))
        return own
    # Without hooks (private in torch), which ``__setstate__`` makes anew.
    attributes = {name: value for name, value in without_amp(optimizer).items() if not name.endswith("_hooks")}
    stand_in = torch.zeros_like(p.detach()).requires_grad_()
    attributes |= {"state": defaultdict(dict), "param_groups": [{**group, "params": [stand_in]}]}
    twin = object.__new__(type(optimizer))
    twin.__setstate__({**attributes, "defaults": dict(optimizer.defaults)})
    zeros = torch.zeros_like(stand_in, requires_grad=False)
    stand_in.grad = zeros.to_sparse(1) if isinstance(optimizer, torch.optim.SparseAdam) else zeros
    type(optimizer).step(twin)
    state: State = twin.state[stand_in]
    return state
