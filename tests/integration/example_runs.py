"""Runs examples as a user does, in a fresh process of their own, or in several. conftest.py has the quicker ways."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(script: str, *arguments: object, cwd: Path, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, "-W", "error", *torchrun, str(ROOT / "examples" / script), *map(str, arguments)]
    # The package of this tree, not another that is installed.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL
    )
