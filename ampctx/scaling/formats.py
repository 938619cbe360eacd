"""The checkpoint formats of loss scales, of apex and torch: checks and conversions.

    amp.state_dict()           {"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0}, "loss_scaler1": ...}
    GradScaler.state_dict()    {"scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000,
                                "_growth_tracker": 0}
    FP16_Optimizer             the scaler itself, an object, at "loss_scaler"; or its "cur_scale" and "cur_iter"

apex's amp has used one format since it first saved its state (August 2019); FP16_Optimizer is older. Numbers may be
tensors or arrays of one element, as some programs save them. Nothing here reads or changes a ``LossScale``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ampctx._errors import AmpError, AmpKeyError, AmpTypeError, AmpValueError
from ampctx.scaling.loss_scale import (
    check_backoff_factor,
    check_count,
    check_growth_factor,
    check_loss_id,
    check_scale,
    required,
)

KEY = "loss_scaler"
# The entries that amp.state_dict(masters=True) adds to the loss scales.
RUN_KEYS = ("opt_level", "optimizers", "deferred")
# The attributes of the scaler objects that FP16_Optimizer saved.
_OF_OBJECTS = ("_loss_scale", "_unskipped", "cur_scale", "cur_iter", "last_overflow_iter", "scale_window")


def is_amp_state(state: Any) -> bool:
    """Whether ``state`` looks like apex's: a dict with a key ``loss_scaler<number>``."""
    return isinstance(state, Mapping) and any(re.match(KEY + r"\d", str(key)) for key in state)


def is_grad_scaler_state(state: Any) -> bool:
    """Whether ``state`` looks like a GradScaler's: a dict with "scale" or "_growth_tracker". Not {} of a disabled
    one."""
    return isinstance(state, Mapping) and ("scale" in state or "_growth_tracker" in state)


def plain(value: Any) -> Any:
    """The number in a tensor or array of one element; other values unchanged. Host sync for an accelerator's tensor."""
    size = getattr(value, "numel", None) or getattr(value, "size", None)
    size = size() if callable(size) else size
    return value.item() if size == 1 and hasattr(value, "item") else value


def read_amp_entries(state: Any) -> dict[int, dict[str, Any]]:
    """Checks a state in apex's format. Returns its entries by number: "loss_scale", "unskipped", "hysteresis" if given.

    Ignores ``RUN_KEYS``.

    Raises:
        AmpKeyError: a key that is not ``loss_scaler<number>``, or an entry without "loss_scale" or "unskipped".
        AmpTypeError, AmpValueError: the state or an entry is no dict, or a value is out of range.
    """
    if not isinstance(state, Mapping):
        raise AmpTypeError(f"state_dict must be a dict, got {type(state).__name__}")
    matches = {k: re.fullmatch(KEY + r"(0|[1-9]\d*)", str(k), re.ASCII) for k in state if k not in RUN_KEYS}
    if unexpected := [k for k, match in matches.items() if match is None]:
        keys = ", ".join(f'"{k}"' for k in unexpected)
        raise AmpKeyError(f"Error(s) in loading state_dict. Unexpected key(s) in state_dict: {keys}.")
    entries = {}
    for key, match in matches.items():
        assert match is not None
        try:
            entries[int(match[1])] = _read_amp_entry(state[key])
        except AmpError as error:
            raise type(error)(f'state_dict["{key}"]: {error}') from None
    return entries


def _read_amp_entry(entry: Any) -> dict[str, Any]:
    if not isinstance(entry, Mapping):
        raise AmpTypeError(f"the loss scale's state must be a dict, got {type(entry).__name__}")
    result = {
        "loss_scale": check_scale("loss_scale", plain(required(entry, "loss_scale"))),
        "unskipped": check_count("unskipped", plain(required(entry, "unskipped")), 0),
    }
    if "hysteresis" in entry:
        result["hysteresis"] = check_count("hysteresis", plain(entry["hysteresis"]), 0)
    return result


def read_grad_scaler_state(state: Any) -> dict[str, Any]:
    """Checks a GradScaler's state. Returns its five entries as plain numbers, and ignores others.

    Raises:
        AmpError: an empty dict, as a disabled scaler saves. AmpKeyError: a missing key.
        AmpTypeError, AmpValueError: no dict, or an invalid entry, by name.
    """
    if not isinstance(state, Mapping):
        raise AmpTypeError(f"state_dict must be a dict, got {type(state).__name__}")
    if len(state) == 0:
        raise AmpError(
            "The source state dict is empty, possibly because it was saved from a disabled instance of GradScaler. "
            "Load it only `if state:`. See docs/errors.md#the-source-state-dict-is-empty."
        )
    checks: dict[str, Any] = {
        "scale": lambda value: check_scale("scale", value),
        "growth_factor": check_growth_factor,
        "backoff_factor": check_backoff_factor,
        "growth_interval": lambda value: check_count("growth_interval", value, 1),
        "_growth_tracker": lambda value: check_count("_growth_tracker", value, 0),
    }
    return {name: check(plain(required(state, name))) for name, check in checks.items()}


def only_amp_entry(state: Any, loss_id: int | None = None) -> dict[str, Any]:
    """The only entry of a state in apex's format, or entry ``loss_id``.

    Raises:
        AmpKeyError: there is no such entry. AmpTypeError: ``loss_id`` is no int. AmpValueError: several entries and no
            ``loss_id``. Also the errors of ``read_amp_entries``.
    """
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


def to_grad_scaler_state(amp_state: Mapping[str, Any], loss_id: int | None = None) -> dict[str, Any]:
    """Converts apex's format into a state for ``torch.amp.GradScaler`` and ``ampctx.GradScaler``.

    Host sync only for tensors of an accelerator in the state, as some programs save them.

    Args:
        amp_state: a dict of ``amp.state_dict()``, of ampctx or apex.
        loss_id: which of its loss scales, an int. Optional if there is one.

    Returns:
        Scale and counter, with the growth settings of apex and ``ampctx.amp``: growth by 2 after 2000 clean steps,
        backoff by 0.5. torch has the same defaults.

    Raises:
        AmpKeyError, AmpTypeError, AmpValueError: an invalid state, by name; several scales and no ``loss_id``.
    """
    entry = only_amp_entry(amp_state, loss_id)
    return {
        "scale": entry["loss_scale"],
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "_growth_tracker": entry["unskipped"],
    }


def to_amp_state(grad_scaler_state: Mapping[str, Any], num_losses: int = 1) -> dict[str, Any]:
    """Converts a GradScaler's state into one for ``amp.load_state_dict`` of ampctx or apex.

    Host sync only for tensors of an accelerator in the state, as some programs save them.

    Args:
        grad_scaler_state: a dict of ``GradScaler.state_dict()``, of torch or ampctx.
        num_losses: the number of equal entries to write, an int >= 1.

    Returns:
        ``{"loss_scaler0": {"loss_scale": ..., "unskipped": ...}, ...}``. The format has no growth settings.

    Raises:
        AmpError: an empty dict, as a disabled scaler saves. AmpKeyError, AmpTypeError, AmpValueError: a missing or
            invalid entry, by name.
    """
    state = read_grad_scaler_state(grad_scaler_state)
    count = check_count("num_losses", num_losses, 1)
    return {f"{KEY}{i}": {"loss_scale": state["scale"], "unskipped": state["_growth_tracker"]} for i in range(count)}


def fp16_optimizer_entry(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Converts a ``FP16_Optimizer.state_dict()`` of apex into an entry of apex's amp. None if it has no scale.

    ``fp16_utils`` saves the scaler object at "loss_scaler": since February 2019 amp's, before that its own static or
    dynamic one. ``contrib.optimizers`` saves numbers.

    Raises:
        AmpTypeError, AmpValueError: an invalid value, by name.
    """
    scaler = state.get("loss_scaler", state)
    values = (
        scaler if isinstance(scaler, Mapping) else {k: getattr(scaler, k) for k in _OF_OBJECTS if hasattr(scaler, k)}
    )
    if "_loss_scale" in values:
        return _read_amp_entry({"loss_scale": values["_loss_scale"], "unskipped": values.get("_unskipped", 0)})
    if "cur_scale" not in values:
        return None
    unskipped = 0
    if "scale_window" in values:
        # It counts all iterations, skipped ones included, and growth resets no counter: each window starts at 0.
        window = check_count("scale_window", plain(values["scale_window"]), 1)
        last = check_count("last_overflow_iter", plain(required(values, "last_overflow_iter")), -1)
        unskipped = (check_count("cur_iter", plain(required(values, "cur_iter")), 0) - last - 1) % window
    return _read_amp_entry({"loss_scale": values["cur_scale"], "unskipped": unskipped})
