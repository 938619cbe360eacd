"""Translates options of ``amp.initialize`` to ``torch.autocast`` and ``torch.amp.GradScaler``."""

from __future__ import annotations

import ast
import math
from typing import NamedTuple

import libcst as cst

from ampctx_apex.migrate import flow, guards
from ampctx_apex.migrate.analysis import Parsed

# Values at which an option can be dropped.
_DEFAULTS: dict[str, list[object]] = {
    "opt_level": ["O1"],
    "cast_model_type": [None],
    "patch_torch_functions": [None, True],
    "keep_batchnorm_fp32": [None],
    "master_weights": [None, False],
    "cast_model_outputs": [None],
    "min_loss_scale": [None],
    "max_loss_scale": [2.0**24],
    "verbosity": [0, 1, 2],
}
# Options that need not be literals: the first has no effect on the numbers, and the second must be None at O1.
_FREE = {"verbosity", "keep_batchnorm_fp32"}
# One scale serves all losses.
_DROPPED = {"num_losses"}
# A growth interval no run reaches.
_STATIC = "growth_interval=2**31 - 1"


class Options(NamedTuple):
    """Extra arguments for ``autocast`` and ``GradScaler``.

    ``static``: a fixed scale other than 1, or one that may be; torch has none. ``enabled``: the conditions for amp.
    ``level``, ``scale``: the expressions of an ``opt_level`` and a ``loss_scale`` that are known at run time only.
    """

    autocast: list[str]
    scaler: list[str]
    static: bool
    level: str | None = None
    enabled: tuple[str, ...] = ()
    scale: str | None = None


def read(
    parsed: Parsed, call: cst.Call, given: dict[str, cst.BaseExpression], guarded: bool, first: str | None
) -> Options:
    """The options of a call. ``guarded``: it runs on a condition. ``first``: a first scale that is assigned later.

    Raises:
        NotUnderstood: an option is not a literal where torch needs one, or torch has no equivalent.
    """
    values: dict[str, object] = {}
    unknown: dict[str, str] = {}
    for name, expression in given.items():
        if name in _DROPPED and guards.is_pure(expression):
            continue
        source = parsed.source(expression)
        try:
            values[name] = ast.literal_eval(source)
        except (ValueError, SyntaxError):
            if name not in ("opt_level", "enabled", "loss_scale", *_FREE) or not guards.is_pure(expression):
                raise flow.refuse(parsed, call, f"{name} of amp.initialize is not a literal") from None
            unknown[name] = source
    enabled, scale = values.pop("enabled", True), values.pop("loss_scale", None)
    for name, value in values.items():
        if value not in _DEFAULTS.get(name, []):
            raise flow.refuse(parsed, call, f"torch.amp has no equivalent of {name}={value!r}")
    if not isinstance(enabled, bool):
        raise flow.refuse(parsed, call, f"torch.amp has no equivalent of enabled={enabled!r}")
    conditions = (unknown["enabled"],) if "enabled" in unknown else ()
    level = unknown.get("opt_level")
    off = ["enabled=False"]
    if not enabled:
        return Options(off, off, False)
    if "loss_scale" in unknown:
        return Options([], ["**scale_options"], True, level, conditions, unknown["loss_scale"])
    if scale is None or scale == "dynamic":
        return Options([], [f"init_scale={first}"] if first is not None else [], False, level, conditions)
    number = _number(scale)
    if number is None:
        raise flow.refuse(parsed, call, f"torch.amp has no equivalent of loss_scale={scale!r}")
    if number == 1.0 and not (guarded or conditions or level):
        return Options([], off, False)
    return Options([], [f"init_scale={number!r}", _STATIC], True, level, conditions)


def _number(scale: object) -> float | None:
    """A scale as apex reads it; None if it is no positive finite number."""
    try:
        number = float(scale) if isinstance(scale, int | float | str) and not isinstance(scale, bool) else math.nan
    except ValueError:
        return None
    return number if 0 < number < math.inf else None
