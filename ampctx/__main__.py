"""``python -m ampctx`` and the ``ampctx`` command: what is installed, which kernels are in use, and why."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import warnings
from collections.abc import Sequence
from typing import Any


def info() -> dict[str, Any]:
    """Versions, and what the compiled extension offers on this machine. Reads no device memory."""
    import torch

    with warnings.catch_warnings():
        # What the import would warn of is in the report itself.
        warnings.simplefilter("ignore", RuntimeWarning)
        import ampctx
        from ampctx import _extension

    extension = ampctx.ops.extension
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "ampctx": ampctx.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "gpus": gpus,
        "extension": {
            "loaded": extension.loaded,
            "path": str(_extension.LIBRARY),
            "backends": list(extension.backends),
            "reason": extension.reason,
            **extension.build,
        },
    }


def _lines(report: dict[str, Any]) -> list[str]:
    extension = report["extension"]
    lines = [
        f"ampctx     {report['ampctx']}",
        f"python     {report['python']}",
        f"torch      {report['torch']} (CUDA {report['torch_cuda'] or 'not built in'})",
        f"GPUs       {', '.join(report['gpus']) or 'none visible'}",
    ]
    if not extension["loaded"]:
        return [*lines, "extension  not loaded: the ops run on plain torch", f"           {extension['reason']}"]
    lines.append(f"extension  loaded, kernels in use for {' and '.join(extension['backends'])}")
    lines.append(f"CPU        {extension['simd_used']} (built: {', '.join(extension['simd'])})")
    if extension["cuda"]:
        lines.append(f"CUDA       built with {extension['cuda']} for {', '.join(extension['cuda_archs'])}")
    if extension["reason"]:
        lines.append(f"           not in use: {extension['reason']}")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="ampctx", description="Mixed-precision training in apex.amp's words.")
    commands = parser.add_subparsers(dest="command", metavar="command")
    info_parser = commands.add_parser("info", help="versions, and which compiled kernels are in use (the default)")
    info_parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args(argv)
    report = info()
    if getattr(arguments, "json", False):
        print(json.dumps(report, indent=2))
    else:
        print("\n".join(_lines(report)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
