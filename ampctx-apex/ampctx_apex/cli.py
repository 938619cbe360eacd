"""The ``ampctx-apex`` command: ``run`` a program written for apex, ``migrate`` its imports, or show ``info``."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ampctx_apex import __version__
from ampctx_apex.migrate import cli as migrate
from ampctx_apex.roots import MODULES


def apex_in_use() -> str:
    """Names what ``import apex`` gives in this environment, in words. Imports no apex."""
    spec = importlib.util.find_spec("apex")
    if spec is not None and spec.origin is not None and not Path(spec.origin).is_relative_to(MODULES):
        folder = Path(spec.origin).parent
        try:
            version = importlib.metadata.version("apex")
        except importlib.metadata.PackageNotFoundError:
            version = "unknown"
        parts = "with amp" if (folder / "amp").is_dir() else "without amp"
        return (
            f"another apex, version {version}, in {folder}, {parts}. Use 'ampctx-apex run', or run 'pip uninstall apex'"
        )
    if spec is not None and spec.origin is not None:
        return f"from ampctx-apex {__version__}"
    if os.environ.get("AMPCTX_APEX") == "0":
        return "not served, because AMPCTX_APEX=0"
    return "not served: ampctx_apex.pth is not in site-packages. Use 'ampctx-apex run', or install ampctx-apex with pip"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="ampctx-apex", description="Run programs written for apex over ampctx.")
    parser.add_argument("--version", action="version", version=f"ampctx-apex {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    commands.add_parser("info", help="show what 'import apex' gives here (the default)")
    run_parser = commands.add_parser(
        "run",
        usage="ampctx-apex run [-h] (script.py | directory | - | -m module) ...",
        help="run a program written for apex, even if another apex is installed",
    )
    run_parser.add_argument("-m", dest="module", action="store_true", help="run a module, as python -m does")
    run_parser.add_argument(
        "program", nargs=argparse.REMAINDER, help="a script (- for stdin) or a module name, then its arguments"
    )
    migrate.add_arguments(commands.add_parser("migrate", help="rewrite apex imports to ampctx"))
    arguments = parser.parse_args(argv)
    if arguments.command == "migrate":
        return migrate.run(arguments)
    try:
        # Without a torch that ampctx supports, this says what to install.
        from ampctx import amp  # noqa: F401
    except ImportError as error:
        print(error, file=sys.stderr)
        return 1
    if arguments.command == "run":
        if not arguments.program:
            run_parser.error("name the script, or with -m the module, to run")
        if not arguments.module and arguments.program[0] != "-" and not os.path.exists(arguments.program[0]):
            run_parser.error(f"there is no script {arguments.program[0]!r}")
        from ampctx_apex.run import run

        run(arguments.program, arguments.module)
        return 0
    print(f"apex       {apex_in_use()}")
    print("kernels    see 'python -m ampctx'")
    return 0
