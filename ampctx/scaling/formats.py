"""The checkpoint formats of loss scales, of apex and torch, checked.

    amp.state_dict()           {"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0}, "loss_scaler1": ...}
    GradScaler.state_dict()    {"scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000,
                                "_growth_tracker": 0}

Both are format 1, which needs no ``format`` number. Numbers may be tensors or arrays of one element.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ampctx import _saved as saved
from ampctx._errors import AmpError, AmpKeyError, AmpValueError
from ampctx.scaling.loss_scale import FACTORS, check_count, check_factor, check_loss_id, check_scale

KEY = "loss_scaler"
# The entries that amp.state_dict(masters=True) adds to the loss scales.
RUN_KEYS = ("format", "opt_level", "optimizers", "deferred")


def plain(value: Any) -> Any:
    """The number in a tensor or array of one element; other values unchanged. Host sync for an accelerator's tensor."""
    size = getattr(value, "numel", None) or getattr(value, "size", None)
    size = size() if callable(size) else size
    return value.item() if size == 1 and hasattr(value, "item") else value


def required(state: Mapping[str, Any], key: str) -> Any:
    return saved.entry(state, key, object, "the loss scale's state")


def is_amp_state(state: Any) -> bool:
    """Whether ``state`` looks like apex's: a dict with a key ``loss_scaler<number>``."""
    return isinstance(state, Mapping) and any(re.match(KEY + r"\d", str(key)) for key in state)


def is_grad_scaler_state(state: Any) -> bool:
    """Whether ``state`` looks like a GradScaler's: a dict with "scale" or "_growth_tracker"."""
    return isinstance(state, Mapping) and ("scale" in state or "_growth_tracker" in state)


def read_amp_entries(state: Any) -> dict[int, dict[str, Any]]:
    """Checks a state in apex's format, but for its ``RUN_KEYS``. Returns its entries by number: "loss_scale",
    "unskipped", "hysteresis" if given. AmpKeyError, AmpTypeError and AmpValueError name what does not fit."""
    saved.typed(state, Mapping, "state_dict")
    matches = {k: re.fullmatch(KEY + r"(0|[1-9]\d*)", str(k), re.ASCII) for k in state if k not in RUN_KEYS}
    if unexpected := [k for k, match in matches.items() if match is None]:
        keys = ", ".join(f'"{k}"' for k in unexpected)
        raise AmpKeyError(f"Error(s) in loading state_dict. Unexpected key(s) in state_dict: {keys}.")
    entries = {}
    for key, match in matches.items():
        assert match is not None
        try:
            saved.typed(entry := state[key], Mapping, "the loss scale's state")
            counts = ("unskipped", "hysteresis") if "hysteresis" in entry else ("unskipped",)
            scale = check_scale("loss_scale", plain(required(entry, "loss_scale")))
            numbers = {name: check_count(name, plain(required(entry, name)), 0) for name in counts}
            entries[int(match[1])] = {"loss_scale": scale, **numbers}
        except AmpError as error:
            raise type(error)(f'state_dict["{key}"]: {error}') from None
    return entries


def read_grad_scaler_state(state: Any) -> dict[str, Any]:
    """Checks a GradScaler's state. Returns its five entries as plain numbers, under torch's names. AmpError for an
    empty dict; AmpKeyError, AmpTypeError and AmpValueError name what does not fit."""
    saved.typed(state, Mapping, "state_dict")
    if len(state) == 0:
        raise AmpError(
            "The source state dict is empty, possibly because it was saved from a disabled instance of GradScaler. "
            "Load it only `if state:`. See docs/errors.md#the-source-state-dict-is-empty."
        )
    if plain(state.get("format", 1)) != 1:
        raise AmpValueError(
            f"the state of the GradScaler has format {state['format']}, and this version of ampctx reads format 1. "
            "Load it with the version that saved it, or with a later one."
        )
    numbers = {name: plain(required(state, name)) for name in ("scale", *FACTORS, "growth_interval", "_growth_tracker")}
    factors = {name: check_factor(name, numbers[name]) for name in FACTORS}
    counts = {name: check_count(name, numbers[name], n) for name, n in (("growth_interval", 1), ("_growth_tracker", 0))}
    return {"scale": check_scale("scale", numbers["scale"]), **factors, **counts}


def only_amp_entry(state: Any, loss_id: int | None = None) -> dict[str, Any]:
    """The only entry of a state in apex's format, or entry ``loss_id``. Errors as ``read_amp_entries``; AmpValueError
    for several entries and no ``loss_id``."""
    entries = read_amp_entries(state)
    names = ", ".join(f"{KEY}{i}" for i in entries) or "none"
    if loss_id is None:
        if len(entries) > 1:
            raise AmpValueError(
                f"the state holds {len(entries)} loss scales ({names}), and a GradScaler has one. Choose one with "
                "ampctx_apex.checkpoints.to_grad_scaler_state(state, loss_id=0)."
            )
        loss_id = next(iter(entries), 0)
    loss_id = check_loss_id(loss_id)
    if loss_id not in entries:
        raise AmpKeyError(f'the state has no "{KEY}{loss_id}", only: {names}')
    return entries[loss_id]
