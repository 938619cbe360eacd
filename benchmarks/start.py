"""Before the first step: the build of the CPU kernels, and `import ampctx` after `import torch`, in new processes.

python benchmarks/start.py --csv start.csv
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measuring import ROOT, options, parse, report

NAMED = ("device",)
IMPORT = "import torch, time; start = time.perf_counter(); import ampctx; print((time.perf_counter() - start) * 1e3)"


def build() -> float:
    """Milliseconds, in a copy of the tree, so that all sources compile anew."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("csrc", "ampctx"):
            shutil.copytree(ROOT / name, Path(folder) / name, ignore=shutil.ignore_patterns("_ops.so"))
        for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, folder)
        command, only = [sys.executable, "setup.py", "--quiet", "build"], {"AMPCTX_CUDA": "0", "AMPCTX_KERNELS": "1"}
        start = time.perf_counter()
        subprocess.run(command, cwd=folder, env=os.environ | only, stdout=subprocess.DEVNULL, check=True)
        return (time.perf_counter() - start) * 1e3


def imported() -> float:
    """Milliseconds. The first of all compiles the Python code."""
    variables = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}
    return float(subprocess.check_output([sys.executable, "-c", IMPORT], cwd=ROOT, env=variables))


def parser() -> argparse.ArgumentParser:
    return options(__file__, __doc__)


def main(arguments: list[str] | None = None) -> None:
    args = parse(described := parser(), arguments)
    imported()
    found = {"import/ampctx/time": [imported() for _ in range(args.rounds)], "build/ampctx/time": [build()]}
    report(described, args, found, *NAMED)


if __name__ == "__main__":
    sys.exit(main())
