"""Makes ``apex`` and the top-level names of its extensions importable, and undoes it.

The modules are files in ``modules/`` under apex's names. Modules that ampctx lacks come from an installed apex: its
directories come second in the ``__path__`` of each package.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from pkgutil import extend_path
from types import ModuleType
from typing import Any, Literal

from ampctx import AmpError, AmpNotImplementedError, AmpValueError
from ampctx_apex.distribution import ApexDistribution
from ampctx_apex.installed import attribute_of
from ampctx_apex.names import ALIASES, NAMES, is_refused_at_import, is_same, public, refusal, same
from ampctx_apex.roots import MODULES, ROOTS


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a file of ``modules/``. What the module lacks the table has, or they are submodules and refused names."""

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        is_extension = "." not in name and name != "apex"
        lacking = attribute_of(name) if is_extension else functools.partial(_lacking, module)
        module.__getattr__ = lacking  # type: ignore[method-assign]
        if hasattr(module, "__path__"):
            # The modules that ampctx lacks come from an installed apex.
            module.__path__ = extend_path(module.__path__, name)
        super().exec_module(module)
        listed = vars(module).get("__all__", public(name))
        below = (entry.rpartition(".") for entry in NAMES if is_same(entry))
        vars(module)["__all__"] = sorted({*listed, *(last for package, _, last in below if package == name)})
        # Submodules in which apex had the members of a package: for old pickles, too.
        for alias in ALIASES:
            package, _, last = alias.rpartition(".")
            if package == name:
                sys.modules[alias] = module
                setattr(module, last, module)


def _lacking(module: ModuleType, attribute: str) -> Any:
    name = f"{module.__name__}.{attribute}"
    if not attribute.startswith("__"):
        if is_same(name):
            return vars(module).setdefault(attribute, same(name))
        try:
            spec = importlib.util.find_spec(name) if hasattr(module, "__path__") else None
        except ApexImportError as error:
            raise AttributeError(str(error)) from None
        if spec is not None and not isinstance(spec.loader, _RefusedFinder):
            return importlib.import_module(name)
        if refusal(name) is not None:
            return refused(name)
    raise AttributeError(f"module {module.__name__!r} has no attribute {attribute!r}")


def served(fullname: str, path: Sequence[str] | None = None) -> importlib.machinery.ModuleSpec | None:
    """The spec of ampctx-apex's module for one of ``ROOTS``, or for a submodule, of the package's ``path``."""
    spec = importlib.machinery.PathFinder.find_spec(fullname, [MODULES] if path is None else path)
    if spec is None or not Path(spec.origin or "").is_relative_to(MODULES):
        return None
    spec.loader = _Loader(fullname, str(spec.origin))
    return spec


class _ServedFinder(DistributionFinder):
    """First in ``sys.meta_path``: finds ampctx's modules for the names in ``ROOTS``, before an installed apex."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return served(fullname, path) if fullname.partition(".")[0] in ROOTS else None

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterable[Distribution]:
        """The metadata of apex, in a search by its name or for all distributions."""
        name = None if context is None else context.name
        return [ApexDistribution()] if name is None or name.lower() == "apex" else []


class ApexImportError(AmpNotImplementedError, ModuleNotFoundError):
    """The import of an apex module that ampctx does not support."""


class _RefusedFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Last in ``sys.meta_path``: raises for unsupported apex modules, or makes modules whose members raise when called.

    ``at_call``: the latter for all of them; else for those that programs import without a need.
    """

    def __init__(self, at_call: bool) -> None:
        self.at_call = at_call

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        message = refusal(fullname) if fullname.startswith("apex.") else None
        if message is None:
            return None
        if is_refused_at_import(fullname) and not self.at_call:
            # Without its name attribute: "from apex import transformer" would drop an error that has it.
            raise ApexImportError(message)
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
    """Type of the placeholder classes for unsupported apex names.

    Their attributes are placeholders too: the name may be a module, as in ``from apex.transformer import utils``, or an
    autograd function, whose ``apply`` is the call.
    """

    def __getattr__(cls, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {attribute!r}")
        return refused(f"{cls.__module__}.{cls.__qualname__}.{attribute}")


def refused(name: str) -> type:
    """A placeholder for an unsupported apex name. Calling it raises AmpNotImplementedError with ``refusal(name)``."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        raise AmpNotImplementedError(refusal(name) or f"{name} is not supported by ampctx")

    module, _, attribute = name.rpartition(".")
    return _Refused(attribute, (), {"__init__": __init__, "__module__": module, "__doc__": refusal(name)})


_finders: list[importlib.abc.MetaPathFinder] = []
_at_uninstall: list[Callable[[], None]] = []


def is_ours(module: ModuleType) -> bool:
    """Whether a module with an apex name comes from ``install_apex``."""
    return isinstance(getattr(module.__spec__, "loader", None), (_Loader, _RefusedFinder))


def install_apex(refuse: Literal["import", "call"] | None = None) -> None:
    """Makes ``apex``, its submodules and extensions such as ``amp_C`` importable in this process.

    Call it before the first ``import apex``. It imports none of these modules. Further calls do nothing.

    Args:
        refuse: "import" raises ApexImportError, an ImportError, for modules that ampctx lacks and programs probe for,
            such as apex.transformer. "call" lets all of these be imported; their members raise when they are called.
            The default is the environment variable AMPCTX_APEX_REFUSE, and "import" without it.

    Raises:
        AmpError: another apex is already imported.
        AmpValueError: another value of ``refuse``.

    Example::

        ampctx_apex.install_apex()
        from apex import amp
    """
    when = refuse or os.environ.get("AMPCTX_APEX_REFUSE") or "import"
    if when not in ("import", "call"):
        source = "AMPCTX_APEX_REFUSE" if refuse is None else "refuse"
        raise AmpValueError(f"install_apex: {source} is {when!r}, expected 'import' or 'call'")
    if _finders:
        return
    for name in ROOTS:
        module = sys.modules.get(name)
        if module is not None and not is_ours(module):
            raise AmpError(
                f"{name} is already imported, from {getattr(module, '__file__', None)}. Call "
                "ampctx_apex.install_apex() before anything imports apex, or start the program with 'ampctx-apex run'."
            )
    _finders.extend([_ServedFinder(), _RefusedFinder(at_call=when == "call")])
    sys.meta_path.insert(0, _finders[0])
    sys.meta_path.append(_finders[1])
    importlib.invalidate_caches()


def at_uninstall(action: Callable[[], None]) -> None:
    """Registers ``action`` for ``uninstall_apex``, for modules with effects outside themselves."""
    _at_uninstall.append(action)


def uninstall_apex() -> None:
    """Undoes ``install_apex``: removes the modules, and apex's attributes from optimizers.

    References to the modules stay usable. With ampctx-apex installed, the next import of apex installs them again.
    """
    while _at_uninstall:
        _at_uninstall.pop()()
    for finder in _finders:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)
    _finders.clear()
    ours = [n for n, m in sys.modules.items() if n.split(".")[0] in ROOTS and m is not None]
    # Also modules of an installed apex: they are children of ampctx's packages.
    for name in ours:
        del sys.modules[name]


__all__ = [
    "MODULES",
    "NAMES",
    "ROOTS",
    "ApexImportError",
    "at_uninstall",
    "install_apex",
    "is_ours",
    "refused",
    "uninstall_apex",
]
