"""Finds the parts of a training checkpoint by entry name and form."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ampctx import AmpKeyError, AmpTypeError, AmpValueError
from ampctx.spi import is_amp_state, is_grad_scaler_state
from ampctx_apex.fp16_optimizer_state import load_file

# fmt: off
LAYOUTS: dict[str, tuple[str, ...]] = {
    "model": (
        "model", "models", "state_dict", "model_state_dict", "model_state", "net", "net_state_dict", "network",
        "network_weights", "module", "weights",
    ),
    "optimizer": (
        "optimizer", "optimizers", "optimizer_state_dict", "optimizer_state", "optimizer_states", "optim",
        "optim_state_dict", "optim_state", "opt",
    ),
    # A dot leads into an entry: mmengine keeps the scale in the optimizer's entry, mmcv under meta.
    "loss_scale": (
        "amp", "amp_state_dict", "amp_state", "apex_amp", "amp_scaling_state", "native_amp_scaling_state",
        "MixedPrecision", "MixedPrecisionPlugin", "NativeMixedPrecisionPlugin", "ApexMixedPrecisionPlugin",
        "scaler", "scaler_state_dict", "scaler_state", "amp_scaler", "amp_grad_scaler", "loss_scaler",
        "grad_scaler", "grad_scaler_state_dict", "grad_scaler_state",
        "optimizer.loss_scaler", "optimizer.apex_amp", "meta.fp16.loss_scaler",
    ),
    "masters": ("master params", "master_params", "masters"),
}
# fmt: on
# Names with other uses: a data scaler, or an FP16_Optimizer object, which is read with its optimizer.
_SHARED = ("scaler", "scaler_state_dict", "scaler_state", "optimizer.loss_scaler")
_log = logging.getLogger("ampctx")


def read(checkpoint: Any) -> Mapping[str, Any]:
    """The entries of a checkpoint: a dict, a path, or a model's state dict.

    Raises:
        AmpTypeError: the checkpoint is neither. AmpError: the file needs other classes.
    """
    if isinstance(checkpoint, (str, os.PathLike)):
        return read(load_file(checkpoint))
    if not isinstance(checkpoint, Mapping):
        raise AmpTypeError(f"a checkpoint is a dict or the path of one, got {type(checkpoint).__name__}")
    if checkpoint and all(isinstance(value, Tensor) for value in checkpoint.values()):
        return {"state_dict": checkpoint}
    return checkpoint


def _is_model_state(value: Any) -> bool:
    return isinstance(value, Mapping) and any(isinstance(v, Tensor) for v in value.values())


def _is_optimizer_state(value: Any) -> bool:
    return isinstance(value, Mapping) and ("param_groups" in value or "optimizer_state_dict" in value)


def _is_scale_state(value: Any) -> bool:
    return is_amp_state(value) or is_grad_scaler_state(value)


def is_tensors(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(v, Tensor) or is_tensors(v) for v in value)


# The test for one item of a part, and its description.
_LOOKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "model": (_is_model_state, "the state dict of a model"),
    "optimizer": (_is_optimizer_state, "the state dict of an optimizer"),
    "loss_scale": (_is_scale_state, "the state of amp or of a GradScaler"),
    "masters": (is_tensors, "a list of tensors"),
}


class Parts:
    """The entries of a checkpoint by part. ``found`` records the keys that were used."""

    def __init__(self, content: Mapping[str, Any], keys: Mapping[str, str | Sequence[str]]) -> None:
        if unknown := keys.keys() - LAYOUTS.keys():
            raise AmpValueError(f"keys has {sorted(unknown)}, expected some of {sorted(LAYOUTS)}")
        self.content, self.keys = content, keys
        self.found: dict[str, str] = {}
        self._used: set[str] = set()

    def _at(self, key: str) -> Any:
        """The entry of a key or dotted key, or None."""
        if key in self.content:
            return self.content[key]
        value: Any = self.content
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    def _fits(self, part: str, value: Any) -> bool:
        looks, _ = _LOOKS[part]
        several = part in ("model", "optimizer") and isinstance(value, (list, tuple)) and len(value) > 0
        return looks(value) or (several and all(map(looks, value)))

    def get(self, part: str) -> Any:
        """The entry of a part (a list if it has several), or None."""
        if part in self.keys:
            return self._named(part, self.keys[part])
        fitting = [key for key in LAYOUTS[part] if self._fits(part, self._at(key))]
        if len(fitting) > 1:
            raise AmpValueError(
                f"the checkpoint's {' and '.join(map(repr, fitting))} each look like {_LOOKS[part][1]}: choose with "
                f"keys={{{part!r}: {fitting[0]!r}}}"
            )
        if part in ("loss_scale", "masters") or not fitting:
            self._check_unfit(part)
        if not fitting:
            return None
        self.found[part] = fitting[0]
        self._used.add(fitting[0])
        return self._at(fitting[0])

    def _check_unfit(self, part: str) -> None:
        """Raises if an entry has a name of the part but another form: it would be ignored in silence."""
        for key in LAYOUTS[part]:
            value = self._at(key)
            if value is None or key in _SHARED or self._fits(part, value):
                continue
            if part == "loss_scale" and isinstance(value, (bool, int, float, str)):
                continue  # an option such as amp=True
            if part == "loss_scale" and isinstance(value, Mapping) and not value:
                _log.warning("the checkpoint's %r is empty, as a disabled scaler saves it. Not loaded.", key)
                continue
            has = f" with {', '.join(map(repr, value)) or 'no entries'}" if isinstance(value, Mapping) else ""
            raise AmpTypeError(
                f"the checkpoint's {key!r} is not {_LOOKS[part][1]}, but of type {type(value).__name__}{has}. "
                f"Name the right entry with keys={{{part!r}: ...}}."
            )

    def _named(self, part: str, named: str | Sequence[str]) -> Any:
        names = [named] if isinstance(named, str) else list(named)
        values = []
        for key in names:
            value = self._at(key)
            if value is None:
                raise AmpKeyError(f"keys[{part!r}] is {key!r}, and the checkpoint has {self._there()}")
            if not self._fits(part, value):
                raise AmpTypeError(
                    f"the checkpoint's {key!r} is not {_LOOKS[part][1]}, but of type {type(value).__name__}"
                )
            values.append(value)
        self.found[part] = ", ".join(names)
        self._used.update(names)
        return values[0] if isinstance(named, str) else values

    def states(self, part: str, given: list[Any]) -> list[Any]:
        """One state for each given object.

        Raises:
            AmpKeyError: the checkpoint has none. AmpValueError: the number differs.
        """
        if not given:
            return []
        value = self.get(part)
        if value is None:
            raise AmpKeyError(
                f"the checkpoint has no {part} under a known name, it has {self._there()}. Name the entry with "
                f"keys={{{part!r}: ...}}."
            )
        states = list(value) if isinstance(value, (list, tuple)) else [value]
        if len(states) != len(given):
            raise AmpValueError(
                f"the checkpoint's {self.found[part]!r} is the state of {len(states)} {part}(s), and {len(given)} "
                "were given"
            )
        return states

    def _there(self) -> str:
        return ", ".join(repr(key) for key in self.content) or "no entries"

    def unused(self) -> dict[str, Any]:
        return {key: value for key, value in self.content.items() if key not in self._used}
