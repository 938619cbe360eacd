"""Maps an apex name to its row in the table, and a row's target to an import."""

from __future__ import annotations

import functools
import importlib
import inspect
import warnings
from types import ModuleType
from typing import Any, NamedTuple

from ampctx_apex import names
from ampctx_apex.install import MODULES
from ampctx_apex.names import Name


class Row(NamedTuple):
    """The table row of a name: ``apex.amp._amp_state.x`` without a row of its own has ``apex.amp._amp_state``'s.

    ``rest``: the part after the row's name. ``entry`` is None for a module with rows below it and for unknown names.
    """

    name: str
    rest: str
    entry: Name | None
    is_module: bool

    @property
    def is_known(self) -> bool:
        return self.entry is not None or self.is_module


def row(name: str) -> Row:
    module, _, last = name.rpartition(".")
    if last.startswith("__") and _has_rows_below(module):
        # apex.__file__ and the like ask about the module itself.
        return Row(module, f".{last}", names.NAMES.get(module), is_module=True)
    prefix, rest = name, ""
    while prefix:
        entry = names.NAMES.get(prefix)
        if entry is not None and not (rest and entry.is_served and _lacks(prefix, entry, rest)):
            # A class may have rows for its attributes.
            return Row(prefix, rest, entry, is_module=not rest and entry.target is not None and is_module(entry.target))
        if not rest and _has_rows_below(prefix):
            return Row(prefix, rest, None, is_module=True)
        prefix, dot, last = prefix.rpartition(".")
        rest = f"{dot}{last}{rest}"
    return Row(name, "", None, is_module=False)


def _has_rows_below(name: str) -> bool:
    return any(other.startswith(name + ".") for other in names.NAMES)


def _lacks(name: str, entry: Name, rest: str) -> bool:
    """Whether the row is a module that has no such name: names in modules have rows of their own."""
    if entry.target is not None and is_module(entry.target):
        return locate(f"{entry.target}{rest}") is None
    if not _has_rows_below(name):
        return False
    path = MODULES.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


class Place(NamedTuple):
    """Where a target is: attribute ``path`` of ``module``; "" is the module itself."""

    module: str
    path: str
    value: Any


@functools.cache
def locate(target: str) -> Place | None:
    """Resolves a target; None if it does not exist.

    Attributes come before sub-modules: ``ampctx.amp.master_params`` is the function.
    """
    root, *parts = target.split(".")
    module, path, value = root, "", _imported(root)
    for part in parts:
        below: Any = getattr(value, part, None)
        if below is None and isinstance(value, ModuleType):
            below = _imported(f"{module}.{part}")
        if below is None:
            return None
        if isinstance(below, ModuleType) and not path:
            module = f"{module}.{part}"
        else:
            path = f"{path}.{part}".strip(".")
        value = below
    return None if value is None else Place(module, path, value)


def _imported(name: str) -> ModuleType | None:
    try:
        with warnings.catch_warnings():
            # torch may deprecate the module.
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except ImportError:
        return None


def is_module(target: str) -> bool:
    place = locate(target)
    return place is not None and isinstance(place.value, ModuleType)


def module_target(module: str) -> str | None:
    """The module that replaces an apex module: from its row, else the module of that name that its rows point to."""
    if module == "apex":
        return "ampctx"
    entry = names.NAMES.get(module)
    if entry is not None and entry.target is not None:
        return entry.target if is_module(entry.target) else None
    last = module.rpartition(".")[2]
    for name, below in names.NAMES.items():
        if name.startswith(module + ".") and below.target is not None:
            suffix = name[len(module) :]
            candidate = below.target.removesuffix(suffix)
            if candidate != below.target and candidate.rpartition(".")[2] == last and is_module(candidate):
                return candidate
    return None


def fits(target: str, positional: int, keywords: list[str]) -> bool:
    """Whether a callable accepts these arguments."""
    place = locate(target)
    if place is None or not callable(place.value):
        return False
    try:
        inspect.signature(place.value).bind(*[None] * positional, **dict.fromkeys(keywords))
    except (TypeError, ValueError):
        return False
    return True
