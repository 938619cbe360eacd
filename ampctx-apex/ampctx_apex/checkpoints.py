"""Reads what apex programs saved and no ``load_state_dict`` takes: ``FP16_Optimizer`` checkpoints, pickled scalers.

``amp.load_state_dict`` reads the state of apex.amp itself. ``to_amp_state`` and ``to_grad_scaler_state`` convert loss
scales.

    state = load_file("checkpoint.pt")
    model.load_state_dict(state["model"])
    load_fp16_optimizer(optimizer, state["optimizer"])
"""

from __future__ import annotations

import argparse
import os
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ampctx import AmpError, AmpKeyError, AmpSession, AmpValueError, spi
from ampctx.spi import check_count, plain, read_amp_entries, required

# Where each version of FP16_Optimizer kept its masters, by param group: apex.fp16_utils those of the fp16 parameters,
# apex.contrib.optimizers those of all, until 2020 as one tensor for each group.
_MASTERS = ("fp32_from_fp16", "fp32_groups", "fp32_groups_flat")


class _SavedScaler:
    """Replaces the scaler objects in files: keeps their attributes, runs none of their code."""


# The attributes of the scaler objects that FP16_Optimizer saved.
_OF_SCALERS = ("_loss_scale", "_unskipped", "cur_scale", "cur_iter", "last_overflow_iter", "scale_window")

# Classes that hold attributes only, by their names in files.
_HARMLESS: list[Any] = [
    argparse.Namespace,
    (_SavedScaler, "apex.amp.scaler.LossScaler"),
    (_SavedScaler, "apex.fp16_utils.loss_scaler.LossScaler"),
    (_SavedScaler, "apex.fp16_utils.loss_scaler.DynamicLossScaler"),
]


def load_file(path: str | os.PathLike[str]) -> Any:
    """``torch.load`` to the CPU, ``weights_only=True``, of a file that may hold apex's scalers and argparse's options.

    Raises:
        AmpError: the file needs other classes.
    """
    try:
        with torch.serialization.safe_globals(_HARMLESS):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        lines = (line.strip() for line in str(error).splitlines())
        reason = next((line for line in lines if "GLOBAL" in line), str(error).partition("\n")[0])
        raise AmpError(
            f"{os.fspath(path)} holds objects of classes that are not loaded by default: {reason} If you trust the "
            "file, call torch.load(path, map_location='cpu', weights_only=False), after "
            "ampctx_apex.install_apex() where classes of apex are in it."
        ) from error


def load_fp16_optimizer(optimizer: Any, state: Mapping[str, Any], session: AmpSession | None = None) -> None:
    """Loads ``FP16_Optimizer.state_dict()`` of any version into an optimizer of ``amp.initialize``, at O2.

    The inner optimizer's state, the fp32 masters, and the loss scale of the first loss. Load the model before.

    Args:
        session: that of the optimizer; that of ``ampctx.amp`` by default.

    Raises:
        AmpKeyError: an entry is missing. AmpValueError: masters of another number or shape. Nothing has changed then.
    """
    session = spi.session if session is None else session
    key = next((name for name in _MASTERS if name in state), None)
    if key is None or "optimizer_state_dict" not in state:
        raise AmpKeyError(f"this is no state of an FP16_Optimizer: it has {sorted(map(str, state))}")
    masters = spi.masters_in(session, optimizer)
    if masters is None:
        raise AmpValueError("load_fp16_optimizer: the optimizer has no masters. Resume at opt_level='O2'")
    groups = [group["params"] for group in optimizer.param_groups]
    if key == "fp32_from_fp16":
        groups = [[p for p in group if p in masters.model_of] for group in groups]
    pairs, entry, inner = paired(groups, state[key], key), fp16_optimizer_entry(state), state["optimizer_state_dict"]
    optimizer.load_state_dict(unflattened(inner, groups) if key == "fp32_groups_flat" else inner)
    if entry is not None:
        session.load_state_dict({"loss_scaler0": entry})
    with torch.no_grad():
        for master, value in pairs:
            master.copy_(value)
    # Now both agree, so no master syncs with the weights loaded before.
    masters.copy_to_model()


def paired(groups: list[list[Tensor]], saved: Sequence[Any], key: str) -> list[tuple[Tensor, Tensor]]:
    """The masters by group, each with its saved value.

    Raises:
        AmpValueError: another number of groups or masters, or another shape.
    """
    if len(saved) != len(groups):
        raise AmpValueError(f"state_dict[{key!r}] has {len(saved)} groups, the optimizer has {len(groups)}")
    pairs: list[tuple[Tensor, Tensor]] = []
    for g, (group, values) in enumerate(zip(groups, saved, strict=True)):
        values = split(values, group, f"state_dict[{key!r}][{g}]") if isinstance(values, Tensor) else values
        if [m.shape for m in group] != [v.shape for v in values]:
            raise AmpValueError(
                f"state_dict[{key!r}][{g}] has masters of shapes {[tuple(v.shape) for v in values]}, the optimizer has "
                f"{[tuple(m.shape) for m in group]}"
            )
        pairs += zip(group, values, strict=True)
    return pairs


def split(flat: Tensor, params: Sequence[Tensor], what: str) -> list[Tensor]:
    """The pieces of a flat tensor for the parameters that it was joined from.

    Raises:
        AmpValueError: it has another number of elements.
    """
    sizes = [p.numel() for p in params]
    if flat.numel() != sum(sizes):
        raise AmpValueError(f"{what} is flat with {flat.numel()} elements, the parameters have {sum(sizes)}")
    return [piece.reshape(p.shape) for piece, p in zip(flat.reshape(-1).split(sizes), params, strict=True)]


def unflattened(state: Mapping[str, Any], groups: list[list[Tensor]]) -> dict[str, Any]:
    """The state of the parameters from that of one flat tensor for each group."""
    result: dict[str, Any] = {"state": {}, "param_groups": []}
    first = 0
    for g, (saved, params) in enumerate(zip(state["param_groups"], groups, strict=True)):
        keys = list(range(first, first + len(params)))
        first += len(params)
        result["param_groups"].append({**saved, "params": keys})
        for name, value in state["state"].get(saved["params"][0], {}).items():
            sized = isinstance(value, Tensor) and value.dim() > 0
            pieces = split(value, params, f"the state {name!r} of group {g}") if sized else [value] * len(params)
            for key, piece in zip(keys, pieces, strict=True):
                result["state"].setdefault(key, {})[name] = piece
    return result


def to_grad_scaler_state(amp_state: Mapping[str, Any], loss_id: int | None = None) -> dict[str, Any]:
    """Converts apex's format into a state for ``torch.amp.GradScaler`` and ``ampctx.GradScaler``.

    Args:
        amp_state: a dict of ``amp.state_dict()``, of ampctx or apex.
        loss_id: which of its loss scales, an int. Optional if there is one.

    Returns:
        Scale and counter, with the growth settings of apex and ``ampctx.amp``: growth by 2 after 2000 clean steps,
        backoff by 0.5. torch has the same defaults.

    Raises:
        AmpKeyError, AmpTypeError, AmpValueError: an invalid state, by name; several scales and no ``loss_id``.
    """
    entry = spi.only_amp_entry(amp_state, loss_id)
    return {
        "scale": entry["loss_scale"],
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "_growth_tracker": entry["unskipped"],
    }


def to_amp_state(grad_scaler_state: Mapping[str, Any], num_losses: int = 1) -> dict[str, Any]:
    """Converts a GradScaler's state into one for ``amp.load_state_dict`` of ampctx or apex.

    Args:
        grad_scaler_state: a dict of ``GradScaler.state_dict()``, of torch or ampctx.
        num_losses: the number of equal entries to write, an int >= 1.

    Returns:
        ``{"loss_scaler0": {"loss_scale": ..., "unskipped": ...}, ...}``. The format has no growth settings.

    Raises:
        AmpError: an empty dict, as a disabled scaler saves. AmpKeyError, AmpTypeError, AmpValueError: a missing or
            invalid entry, by name.
    """
    state = spi.read_grad_scaler_state(grad_scaler_state)
    count = check_count("num_losses", num_losses, 1)
    return {
        f"loss_scaler{i}": {"loss_scale": state["scale"], "unskipped": state["_growth_tracker"]} for i in range(count)
    }


def _checked(entry: dict[str, Any]) -> dict[str, Any]:
    return read_amp_entries({"loss_scaler0": entry})[0]


def fp16_optimizer_entry(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Converts a ``FP16_Optimizer.state_dict()`` of apex into an entry of apex's amp. None if it has no scale.

    ``fp16_utils`` saves the scaler object at "loss_scaler": since February 2019 amp's, before that its own static or
    dynamic one. ``contrib.optimizers`` saves numbers.

    Raises:
        AmpTypeError, AmpValueError: an invalid value, by name.
    """
    scaler = state.get("loss_scaler", state)
    values = (
        scaler if isinstance(scaler, Mapping) else {k: getattr(scaler, k) for k in _OF_SCALERS if hasattr(scaler, k)}
    )
    if "_loss_scale" in values:
        return _checked({"loss_scale": values["_loss_scale"], "unskipped": values.get("_unskipped", 0)})
    if "cur_scale" not in values:
        return None
    unskipped = 0
    if "scale_window" in values:
        # It counts all iterations, skipped ones included, and growth resets no counter: each window starts at 0.
        window = check_count("scale_window", plain(values["scale_window"]), 1)
        last = check_count("last_overflow_iter", plain(required(values, "last_overflow_iter")), -1)
        unskipped = (check_count("cur_iter", plain(required(values, "cur_iter")), 0) - last - 1) % window
    return _checked({"loss_scale": values["cur_scale"], "unskipped": unskipped})


__all__ = ["fp16_optimizer_entry", "load_file", "load_fp16_optimizer", "to_amp_state", "to_grad_scaler_state"]
