"""Starts the ranks of a worker script over gloo and collects what they print."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run_ranks(worker: str, ranks: int, rendezvous: Path, timeout: float = 240, *more: str) -> list[dict]:
    """What each rank of ``tests/<worker>`` printed: one JSON object each. ``more``: arguments after the rank."""
    command = [sys.executable, "-W", "error", str(ROOT / "tests" / worker), str(rendezvous), str(ranks)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([*command, str(rank), *more], env=environment(), **pipes) for rank in range(ranks)]
    try:
        outputs = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(out) for out, _ in outputs]
