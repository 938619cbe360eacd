"""What ``FP16_Optimizer.state_dict()`` of apex holds, in each of its versions; and files with its scaler objects.

apex.fp16_utils            "loss_scaler" (an object), "optimizer_state_dict", "fp32_from_fp16": by group, the masters
                           of the fp16 parameters that train
apex.contrib.optimizers    "cur_scale" and counts, "optimizer_state_dict", "fp32_groups": by group, all masters;
                           until 2020 "fp32_groups_flat": by group one tensor, of which the optimizer kept the state
"""

from __future__ import annotations

import argparse
import os
import pickle
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampctx import AmpError, AmpValueError
from ampctx.spi import fp16_optimizer_entry

Group = dict[str, Any]


class _SavedScaler:
    """Replaces the scaler objects in files: keeps their attributes, runs none of their code."""


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
        raise AmpError(
            f"{os.fspath(path)} holds objects of classes that are not loaded by default: "
            f"{_reason(error)} If you trust the file, call torch.load(path, map_location='cpu', weights_only=False), "
            "after ampctx_apex.install_apex() where classes of apex are in it, and pass the dict."
        ) from error


def _reason(error: pickle.UnpicklingError) -> str:
    """The sentence of torch's message that names the class."""
    return next((line.strip() for line in str(error).splitlines() if "GLOBAL" in line), str(error).partition("\n")[0])


class Saved(NamedTuple):
    """An optimizer's part of a checkpoint.

    ``state``: what its own ``load_state_dict`` takes, but ``flat``: of one parameter for each group. ``masters``: lists
    by group, or a flat tensor for each. ``scale``: an entry in the format of amp. The last two may be None.
    """

    state: Mapping[str, Any]
    flat: bool = False
    masters: list[Any] | None = None
    scale: dict[str, Any] | None = None


def taken_apart(state: Mapping[str, Any]) -> Saved:
    """Splits the state of an optimizer, or of an ``FP16_Optimizer`` around one, into its parts."""
    if "optimizer_state_dict" not in state:
        return Saved(state)
    names = ("fp32_from_fp16", "fp32_groups", "fp32_groups_flat")
    masters = next((state[name] for name in names if name in state), None)
    return Saved(state["optimizer_state_dict"], "fp32_groups_flat" in state, masters, fp16_optimizer_entry(state))


def split(flat: Tensor, params: list[Tensor], what: str) -> list[Tensor]:
    """The pieces of a flat tensor for the parameters that it was joined from.

    Raises:
        AmpValueError: it has another number of elements.
    """
    sizes = [p.numel() for p in params]
    if flat.numel() != sum(sizes):
        raise AmpValueError(f"{what} is flat with {flat.numel()} elements, the parameters have {sum(sizes)}")
    return [piece.reshape(p.shape) for piece, p in zip(flat.reshape(-1).split(sizes), params, strict=True)]


def unflattened(state: Mapping[str, Any], groups: list[Group]) -> dict[str, Any]:
    """The state of the parameters from that of one flat tensor for each group.

    Raises:
        AmpValueError: a tensor of another number of elements, by name.
    """
    result: dict[str, Any] = {"state": {}, "param_groups": []}
    first = 0
    for g, (saved, group) in enumerate(zip(state["param_groups"], groups, strict=True)):
        params = group["params"]
        keys = list(range(first, first + len(params)))
        first += len(params)
        result["param_groups"].append({**saved, "params": keys})
        for key in keys if saved["params"][0] in state["state"] else []:
            result["state"][key] = {}
        for name, value in state["state"].get(saved["params"][0], {}).items():
            sized = isinstance(value, Tensor) and value.dim() > 0
            pieces = split(value, params, f"the state {name!r} of group {g}") if sized else [value] * len(params)
            for key, piece in zip(keys, pieces, strict=True):
                result["state"][key][name] = piece
    return result
