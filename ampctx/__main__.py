"""``python -m ampctx`` and the ``ampctx`` command.

``info`` shows versions, the apex and the kernels in use. ``run`` runs a program written for apex. ``path`` prints the
directory that does the same through PYTHONPATH. ``migrate`` rewrites imports. Without torch, ``--help`` and
``--version`` work; the commands print one line that says what to install.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import textwrap
import warnings
from collections.abc import Sequence
from typing import Any

from ampctx import __version__
from ampctx._torch_version import why_no_torch
from ampctx.migrate import cli as migrate


def info() -> dict[str, Any]:
    """Collects versions, the apex in use and the compiled extension's state on this machine. No host sync."""
    import torch

    with warnings.catch_warnings():
        # The import may warn about the extension. The report says the same.
        warnings.simplefilter("ignore", RuntimeWarning)
        import ampctx
        from ampctx.compat.handover import apex_in_use
        from ampctx.kernels import cuda_support
        from ampctx.kernels import extension as _extension

        extension = ampctx.ops.extension
        # With a driver too old for torch, device_count() works and every other call raises.
        gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
        problem = ""
        if gpus:
            try:
                extension.serves("cuda")  # looks at the GPUs
            except ampctx.AmpError as error:  # AMPCTX_REQUIRE_EXTENSION=cuda
                problem = str(error)
    # Without a GPU, it is unknown whether the CUDA kernels would run.
    backends = [name for name in extension.backends if extension.late is None or name != "cuda"]
    driver = cuda_support.driver_version()
    return {
        "ampctx": ampctx.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "driver_cuda": driver and cuda_support.dotted(driver),
        "gpus": [torch.cuda.get_device_name(i) for i in gpus],
        "gpu_archs": [cuda_support.arch_name(torch.cuda.get_device_capability(i)) for i in gpus],
        "apex": apex_in_use(),
        "extension": {
            "loaded": extension.loaded,
            "path": str(_extension.LIBRARY),
            "backends": [*backends, *map(str, extension.apart)],
            "reason": problem or extension.reason or ("no GPU is visible" if extension.late else ""),
            **extension.build,
        },
    }


def _apex(report: dict[str, Any]) -> str:
    """What ``import apex`` gives, in words."""
    ours = report["ampctx_apex"] and f"ampctx-apex {report['ampctx_apex']}"
    parts = "with amp" if report["has_amp"] else "without amp"
    other = f"version {report['version'] or 'unknown'} in {report['path']}, {parts}"
    match report["provider"]:
        case "ampctx-apex":
            return f"from {ours}"
        case "ampctx":
            return "from ampctx, because AMPCTX_APEX=1"
        case "other" if ours:
            return f"not from ampctx: {other}. To use {ours}, run 'pip uninstall apex'"
        case "other":
            return f"not from ampctx: {other}"
        case "conflict":
            return f"does not import: {ours} does not hide {other}. Uninstall one of the two"
    return "not installed: 'ampctx run' or ampctx-apex provides it"


def _lines(report: dict[str, Any]) -> list[str]:
    """The report as text, in 80 columns."""
    extension = report["extension"]
    gpus = [f"{name} ({arch})" for name, arch in zip(report["gpus"], report["gpu_archs"], strict=True)]
    driver = report["driver_cuda"]
    rows = [
        ("ampctx", report["ampctx"]),
        ("python", report["python"]),
        ("torch", f"{report['torch']} (CUDA {report['torch_cuda'] or 'not built in'})"),
        ("driver", f"serves CUDA {driver}" if driver else "no NVIDIA driver"),
        ("GPUs", ", ".join(gpus) or "none visible"),
        ("apex", _apex(report["apex"])),
    ]
    if extension["loaded"]:
        rows.append(("extension", f"loaded, kernels in use for {' and '.join(extension['backends'])}"))
        rows.append(("CPU", f"{extension['simd_used']} (built: {', '.join(extension['simd'])})"))
        if extension["cuda"]:
            rows.append(("CUDA", f"built with {extension['cuda']} for {', '.join(extension['cuda_archs'])}"))
        if extension["reason"]:
            rows.append(("" if extension["cuda"] else "CUDA", f"not in use: {extension['reason']}"))
    else:
        rows.append(("extension", "not loaded: the ops run on plain torch"))
        rows.append(("", extension["reason"]))
    return [
        line
        for name, text in rows
        for line in textwrap.wrap(
            text, 80, initial_indent=f"{name:11}", subsequent_indent=" " * 11, break_on_hyphens=False
        )
    ]


def _run(parser: argparse.ArgumentParser, program: Sequence[str], module: bool) -> None:
    if not program:
        parser.error("name the script, or with -m the module, to run")
    if not module and program[0] != "-" and not os.path.exists(program[0]):
        parser.error(f"there is no script {program[0]!r}")
    from ampctx.compat.run import run

    run(program, module)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="ampctx", description="Run apex.amp training scripts on current PyTorch.")
    parser.add_argument("--version", action="version", version=f"ampctx {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    info_parser = commands.add_parser("info", help="show versions, the apex and the kernels in use (the default)")
    info_parser.add_argument("--json", action="store_true", help="print one JSON object")
    run_parser = commands.add_parser(
        "run",
        usage="ampctx run [-h] (script.py | directory | - | -m module) ...",
        help="run a program written for apex; its apex imports resolve to ampctx",
    )
    run_parser.add_argument("-m", dest="module", action="store_true", help="run a module, as python -m does")
    run_parser.add_argument(
        "program", nargs=argparse.REMAINDER, help="a script (- for stdin) or a module name, then its arguments"
    )
    commands.add_parser("path", help="print the directory to add to PYTHONPATH for AMPCTX_APEX=1")
    migrate_parser = commands.add_parser("migrate", help="rewrite apex imports to ampctx, or O1 loops to torch.amp")
    migrate.add_arguments(migrate_parser)
    arguments = parser.parse_args(argv)
    if problem := why_no_torch():
        print(problem, file=sys.stderr)
        return 1
    if arguments.command == "migrate":
        return migrate.run(arguments)
    if arguments.command == "run":
        _run(run_parser, arguments.program, arguments.module)
        return 0
    if arguments.command == "path":
        from ampctx.compat.run import STARTUP

        print(STARTUP)
        return 0
    report = info()
    if getattr(arguments, "json", False):
        _print(json.dumps(report, indent=2))
    else:
        _print("\n".join(_lines(report)))
    return 0


def _print(text: str) -> None:
    """Prints, even if the reader has gone, as in ``ampctx info | head -1``."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Otherwise the interpreter's flush at exit would raise.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
