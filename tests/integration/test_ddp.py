"""DistributedDataParallel and fully_shard around an initialized model, two processes, which run all scenarios in turn.

Over gloo on the CPU. On a machine with GPUs also over gloo on one, over NCCL with two, or with one process on one.
"""

import pytest
import torch
from rank_processes import run_ranks

WORKER = "integration/ddp_worker.py"


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def ranks(request, tmp_path_factory):
    return run_ranks(WORKER, 2, tmp_path_factory.mktemp("ddp") / "rendezvous", "gloo", request.param)


@pytest.mark.cuda
def test_nccl(tmp_path):
    """Every scenario over NCCL, which refuses two processes on one GPU."""
    ranks = run_ranks(WORKER, min(2, torch.cuda.device_count()), tmp_path / "rendezvous", "nccl", "cuda")
    assert all(rank == ranks[0] for rank in ranks)
    for level in ("O1", "O2", "O5"):
        assert ranks[0][f"sharded {level}"][-2:] == [1, {"loss_scale": 2.0**15, "unskipped": 2}]


@pytest.mark.parametrize("scenario", ["seeds", "no-sync", "bucket-views"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_ranks_stay_equal(ranks, scenario, level):
    first, second = (rank[f"{scenario} {level}"] for rank in ranks)
    assert first == second
    assert first[-2] == 0


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_on_one_rank_skips_the_step_on_both(ranks, level):
    first, second = (rank[f"overflow {level}"] for rank in ranks)
    assert first == second
    assert first[-2] == 1
    assert first[-1] == {"loss_scale": 2048.0, "unskipped": 1}


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_accumulation_into_a_bucket_of_one_gradient(ranks, level):
    assert [rank[f"one-parameter {level}"] for rank in ranks] == [[3.5], [3.5]]


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
@pytest.mark.parametrize(
    ("scenario", "exact"), [("loaded-by-one", False), ("loaded-by-all", True), ("loaded-into-wrapped", True)]
)
def test_masters_are_equal_after_loading_and_exact_where_all_ranks_load(ranks, level, scenario, exact):
    first, second = (rank[f"{scenario} {level}"] for rank in ranks)
    assert first == second
    assert first[-1] == (exact or level == "O0")


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_sharded_ranks_clip_by_one_norm_and_skip_together(ranks, level):
    """O5 does not scale by itself: here its scale is dynamic, too."""
    first, second = (rank.get(f"sharded {level}") for rank in ranks)
    assert first == second
    assert first is None or first[-2:] == [1, {"loss_scale": 2.0**15, "unskipped": 2}]
