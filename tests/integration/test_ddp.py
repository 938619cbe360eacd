"""DistributedDataParallel around an initialized model, two processes over gloo, which run all scenarios in turn."""

import pytest
from rank_processes import run_ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks("integration/ddp_worker.py", 2, tmp_path_factory.mktemp("ddp") / "rendezvous")


@pytest.mark.parametrize("scenario", ["seeds", "no-sync", "bucket-views", "fused", "fused-bucket-views"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_ranks_stay_equal(ranks, scenario, level):
    first, second = (rank[f"{scenario} {level}"] for rank in ranks)
    assert first == second
    assert first[-2] == 0


@pytest.mark.parametrize("scenario", ["overflow", "fused-overflow"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_on_one_rank_skips_the_step_on_both(ranks, level, scenario):
    first, second = (rank[f"{scenario} {level}"] for rank in ranks)
    assert first == second
    assert first[-2] == 1
    assert first[-1] == {"loss_scale": 2048.0, "unskipped": 3}


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
