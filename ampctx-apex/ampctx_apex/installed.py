"""The compiled extensions of an apex that is installed as well: where names come from that ampctx's modules lack."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ExtensionFileLoader, PathFinder
from types import ModuleType
from typing import Any

from ampctx_apex.names import is_same, same

# By name: what has been loaded.
_loaded: dict[str, ModuleType] = {}


def load(name: str) -> ModuleType | None:
    """The first compiled module ``name`` on sys.path. ``sys.modules[name]`` does not change."""
    if name in _loaded:
        return _loaded[name]
    for entry in sys.path:
        spec = PathFinder.find_spec(name, [entry])
        if spec is None or not isinstance(spec.loader, ExtensionFileLoader):
            continue
        ours = sys.modules.get(name)
        try:
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        finally:
            # Extensions with single-phase initialization add themselves there.
            if ours is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = ours
        _loaded[name] = module
        return module
    return None


def attribute_of(name: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of ampctx's module ``name``."""

    def __getattr__(attribute: str) -> Any:
        missing = f"module {name!r} has no attribute {attribute!r}"
        if attribute.startswith("__"):
            raise AttributeError(missing)
        if is_same(f"{name}.{attribute}"):
            return same(f"{name}.{attribute}")
        try:
            module = load(name)
        except ImportError as error:
            raise AttributeError(
                f"{missing}: ampctx does not serve it, and the {name} of the installed apex cannot be loaded: {error}"
            ) from error
        if module is None:
            raise AttributeError(
                f"{missing}: ampctx does not support it, and no apex with a compiled {name} is installed"
            )
        if not hasattr(module, attribute):
            raise AttributeError(
                f"{missing}: ampctx does not serve it, nor does the {name} of the installed apex, {module.__file__}"
            )
        return getattr(module, attribute)

    return __getattr__


__all__ = ["attribute_of", "load"]
