"""``ampctx-apex run script.py args...``: runs a program whose apex imports get ampctx, in child processes too."""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import os
import runpy
import sys
import types
from collections.abc import Sequence

from ampctx_apex.install import install_apex


def run(program: Sequence[str], module: bool = False) -> None:
    """Runs ``program`` as ``python`` would: a script, or with ``module`` a module name, then its arguments.

    Sets ``sys.argv``, ``sys.path[0]`` and ``__main__``. Exceptions and the exit code pass through. "-" reads stdin.

    Raises:
        SystemExit: the module or directory cannot be run; with a one-line message.
    """
    name = program[0]
    install_apex()
    # For child processes, in which ampctx_apex.pth reads it.
    os.environ["AMPCTX_APEX"] = "1"
    sys.argv = list(program)
    if not getattr(sys.flags, "safe_path", False):  # python -P, from 3.11
        # python names no directory for a script from stdin.
        sys.path[0] = os.getcwd() if module else "" if name == "-" else os.path.dirname(os.path.realpath(name))
    if module:
        _check_module(name)
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    elif name == "-":
        _run_stdin()
    else:
        if os.path.isdir(name) and not any(os.path.isfile(os.path.join(name, f"__main__.py{c}")) for c in ("", "c")):
            sys.exit(f"ampctx-apex run: can't find '__main__' module in {name!r}")
        runpy.run_path(name, run_name="__main__")


def _check_module(name: str) -> None:
    """Exits if the module does not exist; errors in its packages pass through."""
    parts = name.split(".")
    for n in range(1, len(parts) + 1):
        # find_spec imports the parent packages, so check these first.
        found = ".".join(parts[:n])
        if not all(parts[:n]) or importlib.util.find_spec(found) is None:
            sys.exit(f"ampctx-apex run: No module named {found if all(parts[:n]) else name}")
        if n < len(parts) and not hasattr(importlib.import_module(found), "__path__"):
            sys.exit(f"ampctx-apex run: No module named {name}; {found!r} is not a package")
    if _is_package(name) and importlib.util.find_spec(f"{name}.__main__") is None:
        sys.exit(f"ampctx-apex run: No module named {name}.__main__; {name!r} is a package and cannot be run")


def _is_package(name: str) -> bool:
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.submodule_search_locations is not None


def _run_stdin() -> None:
    """Runs stdin as ``__main__``."""
    main = types.ModuleType("__main__")
    vars(main)["__builtins__"] = builtins
    sys.modules["__main__"] = main
    exec(compile(sys.stdin.buffer.read(), "<stdin>", "exec"), vars(main))
