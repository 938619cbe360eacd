"""Starts the ranks of parallel_worker.py and collects what they wrote."""

import os
import subprocess
import sys
from pathlib import Path

import torch

WORKER = Path(__file__).with_name("parallel_worker.py")
ROOT = WORKER.parents[2]


def run(module, directory, world_size=2):
    """Runs all scenarios of ``module``; returns a function from a scenario's name to what the ranks returned."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "ampctx-apex"), str(WORKER.parent)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    files = [directory / f"result{rank}.pt" for rank in range(world_size)]
    command = [sys.executable, str(WORKER), module, str(directory / "rendezvous")]
    ranks = [
        subprocess.Popen(
            [*command, str(file), str(rank), str(world_size)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, file in enumerate(files)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in ranks]
    for process, output in zip(ranks, outputs, strict=True):
        assert process.returncode == 0, output
    results = [torch.load(file, weights_only=False) for file in files]

    def of(name):
        outcomes = [result[name] for result in results]
        for found in outcomes:
            assert "error" not in found, found["error"]
            assert found["warnings"] == []
        return [found["value"] for found in outcomes]

    of.printed = outputs
    return of
