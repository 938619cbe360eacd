"""``ampctx-apex run script.py args...``: runs a program whose apex imports get ampctx, in child processes too."""

from __future__ import annotations

import builtins
import os
import runpy
import sys
import types
from collections.abc import Sequence

from ampctx_apex.install import install_apex


def run(program: Sequence[str], module: bool = False) -> None:
    """Runs ``program`` as ``python`` would: a script, or with ``module`` a module name, then its arguments.

    Sets ``sys.argv``, ``sys.path[0]`` and ``__main__``. Exceptions and the exit code pass through, also runpy's
    ImportError for what is not there. "-" reads stdin.
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
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    elif name == "-":
        _run_stdin()
    else:
        runpy.run_path(name, run_name="__main__")


def _run_stdin() -> None:
    """Runs stdin as ``__main__``."""
    main = types.ModuleType("__main__")
    vars(main)["__builtins__"] = builtins
    sys.modules["__main__"] = main
    exec(compile(sys.stdin.buffer.read(), "<stdin>", "exec"), vars(main))
