"""DistributedDataParallel around an initialized model, two processes over gloo."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("ddp_worker.py")
ROOT = WORKER.parents[2]


def run(scenario, level, tmp_path):
    """What both ranks printed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(WORKER), scenario, level, str(tmp_path / "rendezvous")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen([*command, str(rank)], env=environment, **pipes) for rank in range(2)]
    outputs = [process.communicate(timeout=120) for process in ranks]
    for process, (_, errors) in zip(ranks, outputs, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(out) for out, _ in outputs]


@pytest.mark.parametrize("scenario", ["seeds", "no-sync", "bucket-views", "fused", "fused-bucket-views"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_ranks_stay_equal(scenario, level, tmp_path):
    first, second = run(scenario, level, tmp_path)
    assert first == second
    assert first[-2] == 0


@pytest.mark.parametrize("scenario", ["overflow", "fused-overflow"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_on_one_rank_skips_the_step_on_both(level, scenario, tmp_path):
    first, second = run(scenario, level, tmp_path)
    assert first == second
    assert first[-2] == 1
    assert first[-1] == {"loss_scale": 2048.0, "unskipped": 3}


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_accumulation_into_a_bucket_of_one_gradient(level, tmp_path):
    assert run("one-parameter", level, tmp_path) == [[3.5], [3.5]]
