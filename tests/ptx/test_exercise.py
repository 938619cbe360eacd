"""What gpu-check runs on a GPU, on the PTX: every kernel, with tables of every size and tables on the device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

GPU_CHECK = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"


def test_exercise(interpreter):
    command = [sys.executable, str(GPU_CHECK), "exercise", "--device", "cpu"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
