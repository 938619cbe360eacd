"""Reads the entries of checkpoints. ``where``: the place of an entry, for messages."""

import math
from collections.abc import Mapping
from typing import Any

from ampctx._errors import AmpKeyError, AmpTypeError

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
