"""What gpu-check runs on a GPU, on the PTX: every kernel, with tables of every size and tables on the device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

GPU_CHECK = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"


# 7, 300 and 2,500 as on a GPU; the others fill the tables of 8, 16 and 32 KB for one to six lists that these leave out.
@pytest.mark.parametrize("tensors", [7, 130, 250, 300, 600, 1300, 2500])
def test_exercise(interpreter, tensors):
    command = [sys.executable, str(GPU_CHECK), "exercise", "--device", "cpu", "--tensors", str(tensors)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
