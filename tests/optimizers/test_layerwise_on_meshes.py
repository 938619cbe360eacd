"""LAMB, NovoGrad and LARC step by norms of whole parameters, and Muon by whole matrices, where ranks hold parts of
them."""

import pytest
from rank_processes import run_ranks

WORKER = "optimizers/layerwise_worker.py"
EXACT = 1e-6
# What ranks sum up: to agree on a flag, and for each of six parameters.
FLAG, NUMBERS = 48, 6 * 8
BYTES = {
    "LAMB": [2 * NUMBERS, NUMBERS],
    "LAMB-without-ratio": [2 * NUMBERS],
    "NovoGrad": [NUMBERS],
    "LARC": [2 * NUMBERS],
    "Lion": [],
    "Muon": [],
}


@pytest.fixture(scope="module")
def ranks(request, tmp_path_factory):
    more = ["full"] * request.config.getoption("full")
    return run_ranks(WORKER, 2, tmp_path_factory.mktemp("layerwise") / "rendezvous", 240, *more)


def assert_as_alone(rank, name):
    assert rank[name]["distance"] < EXACT
    assert rank[name]["ranks"] == 0.0


@pytest.mark.parametrize(
    "kind",
    [
        "LAMB",
        "NovoGrad",
        "NovoGrad-inf",
        "LARC",
        "Muon",
        *(
            pytest.param(kind, marks=pytest.mark.full)
            for kind in ("LAMB-nv", "LAMB-without-ratio", "LAMB-l2", "NovoGrad-inside", "LARC-unclipped", "Lion")
        ),
    ],
)
def test_steps_are_those_of_one_process(ranks, kind):
    for rank in ranks:
        assert_as_alone(rank, f"fsdp O0 {kind}")
        assert rank[f"fsdp O0 {kind}"]["bytes"] == [FLAG, *BYTES.get(kind, BYTES[kind.partition("-")[0]])]
    # Uneven parts, and one rank without any element of some parameters.
    assert 0 in ranks[1][f"fsdp O0 {kind}"]["elements"]


def test_tensor_parallelism_sends_numbers_of_split_parameters_alone(ranks):
    for rank in ranks:
        assert_as_alone(rank, "tp O0 LAMB")
        # The last bias is whole on every rank.
        assert rank["tp O0 LAMB"]["bytes"] == [FLAG, 2 * 3 * 8, 3 * 8]


def test_without_amp(ranks):
    for rank in ranks:
        assert_as_alone(rank, "fsdp plain NovoGrad")
        assert rank["fsdp plain NovoGrad"]["bytes"] == [NUMBERS]


@pytest.mark.parametrize(
    "kind",
    ["LAMB", "Muon", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("NovoGrad", "NovoGrad-inf", "LARC"))],
)
def test_a_grad_scaler_skips_on_every_rank(ranks, kind):
    for rank in ranks:
        assert_as_alone(rank, f"fsdp scaler {kind}")


@pytest.mark.parametrize(
    "kind", ["LAMB-nv", "Muon", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("NovoGrad", "LARC"))]
)
def test_a_step_with_gradients_on_one_rank_returns_on_all(ranks, kind):
    for i, rank in enumerate(ranks):
        assert rank[f"one rank {kind}"]["distance"] < EXACT
        assert rank[f"one rank {kind}"]["kept"] == (i == 0)


@pytest.mark.parametrize(
    ("kind", "kept"),
    [
        ("LAMB", "split"),
        ("Muon", "split"),
        *(
            pytest.param(kind, kept, marks=pytest.mark.full)
            for kind, kept in (
                ("LAMB", "True"),
                ("LAMB", "kahan"),
                ("NovoGrad", "split"),
                ("NovoGrad", "True"),
                ("NovoGrad", "kahan"),
                ("Muon", "True"),
                ("Muon", "kahan"),
            )
        ),
    ],
)
def test_16_bit_parameters_with_what_the_optimizer_keeps(ranks, kind, kept):
    for rank in ranks:
        assert rank[f"bf16 {kind} {kept}"] == {"distance": 0.0}


def test_muon_steps_the_experts_of_each_rank(ranks):
    """Whole matrices, uneven over the ranks; a frozen layer takes no part."""
    for rank in ranks:
        assert_as_alone(rank, "experts Muon")
    assert [rank["experts Muon"]["elements"][0] for rank in ranks] == [40, 20]


def test_muon_refuses_tensor_parallel_weights(ranks):
    message = "param_groups[2]['params'][0] has placements (Shard(dim=1),). Put tensor-parallel parameters into a group"
    assert all(message in rank["tp Muon"] for rank in ranks)


@pytest.mark.full
def test_four_ranks(tmp_path):
    for rank in run_ranks(WORKER, 4, tmp_path / "rendezvous"):
        for kind in ("LAMB", "NovoGrad", "NovoGrad-inf", "LARC"):
            assert_as_alone(rank, f"fsdp O0 {kind}")
            assert_as_alone(rank, f"2x2 O0 {kind}")
        assert_as_alone(rank, "fsdp O0 Muon")
        assert_as_alone(rank, "hsdp Muon")
        assert "tensor-parallel parameters into a group with use_muon=False" in rank["2x2 Muon"]
