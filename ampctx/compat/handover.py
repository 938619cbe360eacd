"""Which apex is installed: the distribution ampctx-apex, whose modules hand over to ``install_apex``, or another one.

ampctx-apex has files such as ``apex.py``. In one directory Python takes a package ``apex/`` and a compiled ``amp_C``
before them. So the other apex wins there, and neither distribution overwrites files of the other. ``hand_over`` covers
the remaining cases: it refuses to hide an apex of another directory, or to mix the modules of two.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from ampctx import AmpError
from ampctx.compat.distribution import ApexDistribution
from ampctx.compat.install import MODULES, install_apex

OURS = "ampctx-apex"


def _specs(name: str) -> list[ModuleSpec | None]:
    """What each directory and each further finder has for a top-level module, in their order."""
    found = []
    for finder in list(sys.meta_path):
        if finder is PathFinder:
            found += [PathFinder.find_spec(name, [entry]) for entry in sys.path]
        elif hasattr(finder, "find_spec"):  # of editable installs
            found.append(finder.find_spec(name, None))
    return found


def _is_other(spec: ModuleSpec | None) -> bool:
    """Whether this is an apex from elsewhere: a package with a file. The module of ampctx-apex is no package."""
    if spec is None or spec.origin is None or spec.submodule_search_locations is None:
        return False
    return not Path(spec.origin).is_relative_to(MODULES)


def other_apex() -> ModuleSpec | None:
    """The first apex on ``sys.path`` that is not of ampctx, or None."""
    return next(filter(_is_other, _specs("apex")), None)


def _version(name: str) -> str:
    """The version of an installed distribution, or ""."""
    found = importlib.metadata.distributions(name=name)
    return next((d.version for d in found if not isinstance(d, ApexDistribution)), "")


def hand_over(name: str) -> None:
    """Puts ampctx's module in the place of the module ``name`` of ampctx-apex, which calls this as it is imported.

    Raises:
        ImportError: another apex is installed as well, or a program has put one into ``sys.modules``.
    """
    if other := other_apex():
        apex = " ".join(filter(None, ["another apex", _version("apex")]))
        raise ImportError(
            f"{name}: {OURS} does not hide {apex}, in {_folder(other)}. Keep one: run "
            f"'pip uninstall apex' or 'pip uninstall {OURS}'. 'ampctx run' works with both. See "
            "docs/errors.md#ampctx-apex-does-not-hide-another-apex",
            name=name,
        )
    # The import system returns the module that it finds here afterwards.
    del sys.modules[name]
    try:
        install_apex()
    except AmpError as error:
        raise ImportError(str(error), name=name) from error
    importlib.import_module(name)


def distributions() -> list[importlib.metadata.Distribution]:
    """apex's metadata, for ampctx-apex: none if another apex is what Python imports."""
    return [] if other_apex() else [ApexDistribution()]


def _folder(spec: ModuleSpec) -> str:
    return str(Path(spec.origin or "").parent)


def apex_in_use() -> dict[str, Any]:
    """What ``import apex`` gives in this environment. Imports nothing.

    ``provider`` is "ampctx-apex", "ampctx" (by AMPCTX_APEX=1 or ``install_apex``), "other", "conflict" (the import
    raises) or None. ``version``, ``path`` and ``has_amp`` describe an apex from elsewhere. ``ampctx_apex`` is the
    version of that distribution, or None.
    """
    spec, other = importlib.util.find_spec("apex"), other_apex()
    if _is_other(spec):
        provider: str | None = "other"
    elif spec is None or spec.origin is None:
        provider = None
    elif Path(spec.origin).is_relative_to(MODULES):
        provider = "ampctx"
    else:
        provider = "conflict" if other else OURS
    return {
        "provider": provider,
        "version": other and (_version("apex") or None),
        "path": other and _folder(other),
        "has_amp": other and (Path(_folder(other)) / "amp").is_dir(),
        "ampctx_apex": _version(OURS) or None,
    }


__all__ = ["OURS", "apex_in_use", "distributions", "hand_over", "other_apex"]
