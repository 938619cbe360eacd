"""Reads the entries of checkpoints. ``where``: the place of an entry, for messages."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from ampctx._errors import AmpKeyError, AmpTypeError, AmpValueError, listed

# The number in every format of ampctx, for a change that this version would misread. States without one are of 1.
FORMAT = 1
_NAMES = {Mapping: "dict", (list, tuple): "list"}


def typed(value: Any, kind: Any, where: str) -> None:
    """Raises AmpTypeError unless the value is of a type, or of one in a tuple."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind not in (bool, object)):
        raise AmpTypeError(f"{where} must be a {_NAMES.get(kind) or kind.__name__}, got {type(value).__name__}")


def entry(state: Mapping[Any, Any], key: str, kind: Any, where: str) -> Any:
    """``state[key]``. Raises AmpKeyError if it is missing, AmpTypeError if it is of another type."""
    if key not in state:
        raise AmpKeyError(f'{where} has no "{key}", only {", ".join(map(str, state)) or "nothing"}')
    typed(state[key], kind, f'{where}["{key}"]')
    return state[key]


def plain(value: Any) -> Any:
    """The number in a tensor or array of one element; other values unchanged. Host sync for an accelerator's tensor."""
    shape = getattr(value, "shape", None)
    return value.item() if shape is not None and math.prod(shape) == 1 and hasattr(value, "item") else value


def check_format(state: Mapping[str, Any], where: str, known: Collection[str]) -> None:
    """Raises AmpValueError if a later version of ampctx has saved a state in a way that this one would misread,
    AmpKeyError for other entries than the known ones where the state names its format."""
    number = plain(state.get("format", FORMAT))
    typed(number, int, f'{where}["format"]')
    if number > FORMAT:
        new = ", ".join(f'"{key}"' for key in state if key not in known) or "what its entries mean"
        raise AmpValueError(
            f'{where}["format"] is {number}. This version of ampctx reads formats up to {FORMAT}, and does not know '
            f"{new}. Load it with the version that saved it, or a later one."
        )
    if not {"format", "version"}.isdisjoint(state):  # torch's and apex's have neither
        check_known(state, where, known)


def check_known(state: Mapping[Any, Any], where: str, known: Collection[str]) -> None:
    """Raises AmpKeyError for entries that this version does not know, so that none is lost in silence."""
    if unknown := [f'"{key}"' for key in state if key not in known]:
        raise AmpKeyError(
            f"{where} has {listed(unknown)}, which this version of ampctx does not load. Load it "
            "with the version that saved it, or leave them out."
        )
