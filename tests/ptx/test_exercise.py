"""What gpu-check runs on a GPU, on the PTX: every kernel, with tables of every size and tables on the device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from gpu_exercise import EVERY_TABLE

GPU_CHECK = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"


@pytest.mark.parametrize("tensors", EVERY_TABLE)
def test_exercise(interpreter, tensors):
    command = [sys.executable, str(GPU_CHECK), "exercise", "--device", "cpu", "--tensors", str(tensors)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
