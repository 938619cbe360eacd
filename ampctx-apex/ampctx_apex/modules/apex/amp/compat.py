"""apex.amp.compat: what programs import of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def filter_attrs(module: Any, attrs: Iterable[str]) -> list[str]:
    """The names among ``attrs`` that ``module`` has."""
    return [name for name in attrs if hasattr(module, name)]
