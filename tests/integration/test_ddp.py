"""DistributedDataParallel around an initialized model, two processes over gloo, which run all scenarios in turn."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("ddp_worker.py")
ROOT = WORKER.parents[2]

STAY_EQUAL = [
    (scenario, level)
    for scenario in ("seeds", "no-sync", "bucket-views", "fused", "fused-bucket-views")
    for level in ("O0", "O1", "O2", "O5")
]
OVERFLOW = [(scenario, level) for scenario in ("overflow", "fused-overflow") for level in ("O1", "O2")]
ONE_PARAMETER = [("one-parameter", level) for level in ("O0", "O1", "O2")]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What both ranks came to, for a scenario and a level."""
    cases = ["/".join(case) for case in STAY_EQUAL + OVERFLOW + ONE_PARAMETER]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    rendezvous = tmp_path_factory.mktemp("ddp") / "rendezvous"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [
        subprocess.Popen([sys.executable, str(WORKER), str(rendezvous), str(rank), *cases], env=environment, **pipes)
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for process, (_, errors) in zip(ranks, outputs, strict=True):
        assert process.returncode == 0, errors
    first, second = (json.loads(out) for out, _ in outputs)
    return lambda scenario, level: (first[f"{scenario}/{level}"], second[f"{scenario}/{level}"])


@pytest.mark.parametrize(("scenario", "level"), STAY_EQUAL)
def test_ranks_stay_equal(scenario, level, results):
    first, second = results(scenario, level)
    assert first == second
    assert first[-2] == 0


@pytest.mark.parametrize(("scenario", "level"), OVERFLOW)
def test_an_overflow_on_one_rank_skips_the_step_on_both(scenario, level, results):
    first, second = results(scenario, level)
    assert first == second
    assert first[-2] == 1
    assert first[-1] == {"loss_scale": 2048.0, "unskipped": 3}


@pytest.mark.parametrize(("scenario", "level"), ONE_PARAMETER)
def test_accumulation_into_a_bucket_of_one_gradient(scenario, level, results):
    assert results(scenario, level) == ([3.5], [3.5])
