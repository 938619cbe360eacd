"""Translates options of ``amp.initialize`` to ``torch.autocast`` and ``torch.amp.GradScaler``."""

from __future__ import annotations

import ast
import math
from typing import NamedTuple

import libcst as cst

from ampctx.migrate import flow
from ampctx.migrate.analysis import Parsed

# Values at which an option can be dropped.
_DEFAULTS: dict[str, list[object]] = {
    "opt_level": ["O1"],
    "num_losses": [1],
    "cast_model_type": [None],
    "patch_torch_functions": [None, True],
    "keep_batchnorm_fp32": [None],
    "master_weights": [None, False],
    "cast_model_outputs": [None],
    "min_loss_scale": [None],
    "max_loss_scale": [2.0**24],
    "verbosity": [0, 1, 2],
}


class Options(NamedTuple):
    """Extra arguments for ``autocast`` and ``GradScaler``. ``static``: a fixed scale other than 1; torch has none."""

    autocast: list[str]
    scaler: list[str]
    static: bool


def read(parsed: Parsed, call: cst.Call, given: dict[str, cst.BaseExpression]) -> Options:
    """The options of a call.

    Raises:
        NotUnderstood: an option is not a literal, or torch has no equivalent.
    """
    values: dict[str, object] = {}
    for name, expression in given.items():
        try:
            values[name] = ast.literal_eval(parsed.source(expression))
        except (ValueError, SyntaxError):
            raise flow.refuse(parsed, call, f"{name} of amp.initialize is not a literal") from None
    enabled, scale = values.pop("enabled", True), values.pop("loss_scale", None)
    for name, value in values.items():
        if value not in _DEFAULTS.get(name, []):
            raise flow.refuse(parsed, call, f"torch.amp has no equivalent of {name}={value!r}")
    if not isinstance(enabled, bool):
        raise flow.refuse(parsed, call, f"torch.amp has no equivalent of enabled={enabled!r}")
    off = ["enabled=False"]
    if not enabled:
        return Options(off, off, False)
    if scale is None or scale == "dynamic":
        return Options([], [], False)
    number = _number(scale)
    if number is None:
        raise flow.refuse(parsed, call, f"torch.amp has no equivalent of loss_scale={scale!r}")
    if number == 1.0:
        return Options([], off, False)
    # A growth interval no run reaches.
    return Options([], [f"init_scale={number!r}", "growth_interval=2**31 - 1"], True)


def _number(scale: object) -> float | None:
    """A scale as apex reads it; None if it is no positive finite number."""
    try:
        number = float(scale) if isinstance(scale, int | float | str) and not isinstance(scale, bool) else math.nan
    except ValueError:
        return None
    return number if 0 < number < math.inf else None
