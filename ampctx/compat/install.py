"""Makes ``apex``, ``amp_C`` and ``apex_C`` importable, and takes that back.

The modules are files of their own in ``modules/``, under the names that apex gave them. An apex that is installed
beside ampctx keeps what ampctx does not serve: its directories come second in the ``__path__`` of each package.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from ampctx import AmpError, AmpNotImplementedError
from ampctx.compat.distribution import ApexDistribution
from ampctx.compat.names import NAMES, refusal

MODULES = Path(__file__).resolve().parent / "modules"
SERVED = ("apex", "amp_C", "apex_C")


class _ServedFinder(DistributionFinder):
    """First in ``sys.meta_path``: the names in ``SERVED`` are ours, whatever else is installed under them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in SERVED:
            return None
        return importlib.machinery.PathFinder.find_spec(fullname, [str(MODULES)])

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterable[Distribution]:
        """The metadata of apex, for a search by that name or for everything that is installed."""
        name = None if context is None else context.name
        return [ApexDistribution()] if name is None or name.lower() == "apex" else []


class _RefusedFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Last in ``sys.meta_path``: modules of apex that nobody serves here can be imported, and say so when called."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("apex.") or refusal(fullname) is None:
            return None
        parent, _, name = fullname.rpartition(".")
        above = sys.modules.get(parent)
        # A class that a package of ours refuses is no module: one of its name would take its place on the package.
        if above is not None and name in dir(above):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        module.__doc__ = refusal(name)

        def __getattr__(attribute: str) -> Any:
            if attribute.startswith("__"):
                raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
            return refused(f"{name}.{attribute}")

        module.__getattr__ = __getattr__  # type: ignore[method-assign]


class _Refused(type):
    """Type of the classes that stand for something of apex that is not served.

    What is looked up on one is refused too: it may stand for a module, as after ``from apex.transformer import utils``,
    or for an autograd function, whose ``apply`` is the call.
    """

    def __getattr__(cls, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {attribute!r}")
        return refused(f"{cls.__module__}.{cls.__qualname__}.{attribute}")


def refused(name: str) -> type:
    """A class that stands for something of apex that is not served. Calling it raises what ``refusal(name)`` says."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        raise AmpNotImplementedError(refusal(name) or f"{name} is not supported by ampctx")

    module, _, attribute = name.rpartition(".")
    return _Refused(attribute, (), {"__init__": __init__, "__module__": module, "__doc__": refusal(name)})


_finders: list[importlib.abc.MetaPathFinder] = []
_at_uninstall: list[Callable[[], None]] = []


def is_ours(module: ModuleType) -> bool:
    """Whether a module of apex's name is one of those that ``install_apex`` serves."""
    spec = getattr(module, "__spec__", None)
    origin = getattr(spec, "origin", None) or ""
    return isinstance(getattr(spec, "loader", None), _RefusedFinder) or Path(origin).is_relative_to(MODULES)


def install_apex() -> None:
    """Makes the module names of apex importable in this process: ``apex``, ``amp_C``, ``apex_C`` and all below.

    To be called before the first ``import apex``. Calling it again changes nothing. Imports none of the modules itself.

    Raises:
        AmpError: another apex has been imported already.
    """
    if _finders:
        return
    for name in SERVED:
        module = sys.modules.get(name)
        if module is not None and not is_ours(module):
            raise AmpError(
                f"{name} has been imported already, from {getattr(module, '__file__', None)}. Call "
                "ampctx.compat.install_apex() before anything imports apex, or start the program with 'ampctx run'."
            )
    _finders.extend([_ServedFinder(), _RefusedFinder()])
    sys.meta_path.insert(0, _finders[0])
    sys.meta_path.append(_finders[1])
    importlib.invalidate_caches()


def at_uninstall(action: Callable[[], None]) -> None:
    """Has ``uninstall_apex`` call ``action``: for modules that have tied themselves to something outside of them."""
    _at_uninstall.append(action)


def uninstall_apex() -> None:
    """Takes ``install_apex`` back: the names, the modules under them, and what they have put on optimizers.

    Whoever holds on to a module can go on using it.
    """
    while _at_uninstall:
        _at_uninstall.pop()()
    for finder in _finders:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)
    _finders.clear()
    ours = [n for n, m in sys.modules.items() if n.split(".")[0] in SERVED and m is not None]
    # Also modules of an installed apex: they are children of our packages.
    for name in ours:
        del sys.modules[name]


__all__ = ["MODULES", "NAMES", "SERVED", "at_uninstall", "install_apex", "is_ours", "refused", "uninstall_apex"]
