"""DTensor parameters (fully_shard, tensor parallelism, plain meshes) and ZeroRedundancyOptimizer train as on one rank
alone."""

import pytest
from rank_processes import run_ranks

START = 2.0**16
# A step of five overflows, on one rank alone where each has data of its own.
MOVED = [True, True, False, True, True]
SCALES = [START, START, START / 2, START / 2, START / 2]
# Of weights, and relative of norms. In 16 bits batches of another size are rounded otherwise.
EXACT, FP16, BF16 = 1e-6, 1e-3, 1e-2
# The bytes of a norm, or of a flag with the scale; and of both.
NORM, FLAG = 8, 48
BOTH = NORM + FLAG


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks("reliability/mesh_worker.py", 2, tmp_path_factory.mktemp("mesh") / "rendezvous")


def assert_trained(rank, name, tolerance):
    result = rank[name]
    assert result["moved"] == MOVED
    assert result["scales"] == SCALES
    assert result["finite"] == 4
    assert result["norms"] < tolerance
    assert result["distance"] < tolerance


@pytest.mark.parametrize(
    "kind",
    ["SGD", "AdamW-foreach", "Adam-fused", "FusedSGD", "FusedSGD-without-state", "FusedAdam", "FusedAdagrad"],
)
def test_fully_shard_with_a_grad_scaler(ranks, kind):
    for rank in ranks:
        assert_trained(rank, f"fsdp scaler {kind}", EXACT)


@pytest.mark.parametrize(
    ("run", "tolerance"),
    [("O1 SGD", FP16), ("O1 Adam-fused", FP16), ("O1 FusedAdam", FP16), ("O0 SGD", EXACT), ("O0 FusedAdam", EXACT)],
)
def test_fully_shard_under_amp(ranks, run, tolerance):
    for rank in ranks:
        assert_trained(rank, f"fsdp {run}", tolerance)


@pytest.mark.parametrize("run", ["scaler FusedAdam", "O0 SGD", "O0 Adam-fused"])
def test_fully_shard_that_casts_is_o2(ranks, run):
    for rank in ranks:
        assert_trained(rank, f"fsdp-fp16 {run}", FP16)
        assert rank[f"fsdp-fp16 {run}"]["layer"] == ["torch.float16"]
        assert rank[f"fsdp-fp16 {run}"]["params"] == ["torch.float32"]


def test_fully_shard_that_casts_to_bf16_is_o5(ranks):
    for rank in ranks:
        assert_trained(rank, "fsdp-bf16 O0 SGD", BF16)
        assert rank["fsdp-bf16 O0 SGD"]["layer"] == ["torch.bfloat16"]


@pytest.mark.parametrize("run", ["O5 FusedAdam", "O2 SGD"])
def test_o2_and_o5_of_a_sharded_model_are_a_policy_and_o0(ranks, run):
    for rank in ranks:
        result = rank[f"level {run}"]
        assert result["equal"]
        assert result["shards are masters"]
        assert result["moved"] == MOVED
        assert result["scales"] == SCALES
        assert 0 < result["far from fp32"] < 0.1
    assert ranks[0]["level O5 FusedAdam"]["norms"] == ranks[1]["level O5 FusedAdam"]["norms"]


def test_modules_in_fp32_are_units_of_their_own(ranks):
    for rank in ranks:
        result = rank["in fp32"]
        assert result["equal"]
        assert result["seen"] == ["torch.float32"]
        assert result["moved"] == MOVED
        assert result["shards are masters"]


@pytest.mark.full
def test_o2_and_o5_over_meshes_of_two_dimensions(tmp_path):
    for rank in run_ranks("reliability/mesh_worker.py", 4, tmp_path / "rendezvous", 120, "meshes"):
        assert sorted(rank) == ["hsdp O2", "hsdp O5", "tp O2", "tp O5"]
        for name, result in rank.items():
            assert result["equal"], name
            assert result["shards are masters"], name
            assert result["moved"] == MOVED, name
            assert result["scales"] == SCALES, name


@pytest.mark.parametrize(("run", "tolerance"), [("scaler SGD", EXACT), ("O1 FusedAdam", FP16), ("O4 SGD", BF16)])
def test_tensor_parallelism(ranks, run, tolerance):
    for rank in ranks:
        assert_trained(rank, f"tp {run}", tolerance)


@pytest.mark.parametrize("mesh", ["1 2", "2 1"])
def test_a_mesh_of_two_dimensions(ranks, mesh):
    for rank in ranks:
        assert_trained(rank, f"2d {mesh}", EXACT)
        assert rank[f"2d {mesh}"]["dims"] == [2]
        # Nobody to agree with along the other.
        assert rank[f"2d {mesh}"]["groups"] == 1


@pytest.mark.parametrize("run", ["scaler SGD", "scaler FusedAdam", "O0 Adam-fused"])
def test_gradients_that_are_sums_still_to_be_made(ranks, run):
    for rank in ranks:
        assert_trained(rank, f"replicated {run}", EXACT)
        # Those of a block are laid out as the parameters at its end.
        expected = "(Partial(sum),)" if run.startswith("scaler") else "(Replicate(),)"
        assert rank[f"replicated {run}"]["placements"] == [expected]


@pytest.mark.parametrize("kind", ["SGD", "Adam-fused", "FusedAdam"])
@pytest.mark.parametrize("api", ["scaler", "O1"])
def test_inf_in_the_part_of_one_rank_skips_on_both(ranks, api, kind):
    for i, rank in enumerate(ranks):
        result = rank[f"shard {api} {kind}"]
        assert result["moved"] == [False]
        assert result["same"]
        assert result["scales"] == [START / 2]
        assert result["norms"] == [float("inf")]
        # The rank that has it names it.
        name = "2.weight" if api == "O1" else "param_groups[0][2]"
        assert result["culprits"] == ([name] if i == 1 else [])


@pytest.mark.parametrize("run", ["scaler FusedAdam", "O1 SGD", "O1 FusedAdam", "O5 FusedAdam"])
def test_a_run_resumes_from_the_state_dicts_of_torch(ranks, run):
    for rank in ranks:
        assert rank[f"checkpoint {run}"] == {"distance": 0.0, "scales": True, "kinds": ["DTensor"]}


@pytest.mark.parametrize(
    ("run", "tolerance"), [("scaler True", EXACT), ("O1 True", FP16), ("O1 False", FP16), ("O2 False", FP16)]
)
def test_accumulation(ranks, run, tolerance):
    for rank in ranks:
        assert_trained(rank, f"accumulation {run}", tolerance)


@pytest.mark.parametrize("kept", ["True", "split", "kahan", "rounded"])
def test_16_bit_parameters_with_what_the_optimizer_keeps(ranks, kept):
    for rank in ranks:
        assert rank[f"bf16 {kept}"] == {"distance": 0.0}


@pytest.mark.parametrize(
    "run", ["scaler AdamW", "scaler FusedAdam", "O1 AdamW", "O1 Adam-fused", "O5 FusedAdam-masters"]
)
def test_zero_redundancy_optimizer(ranks, run):
    for rank in ranks:
        result = rank[f"zero {run}"]
        assert result["moved"] == MOVED
        assert result["distance"] == result["norms"] == 0.0
    # Each has the state of some of four parameters; the first has it all once it is consolidated.
    assert sum(rank[f"zero {run}"]["kept"] for rank in ranks) == 4
    assert all(rank[f"zero {run}"]["kept"] > 0 for rank in ranks)
    assert ranks[0][f"zero {run}"]["entries"] == 4
    assert ranks[0][f"zero {run}"]["state"] == 0.0


@pytest.mark.parametrize("kind", ["SGD", "FusedAdam"])
def test_fsdp1_with_a_process_group(ranks, kind):
    for rank in ranks:
        assert rank[f"flattened {kind}"] == {"moved": MOVED, "scale": START / 2}


def test_clipping_by_the_norm_of_whole_tensors(ranks):
    for rank in ranks:
        assert len(rank["norms"]) == 7
        for name, (kind, norm, distance) in rank["norms"].items():
            assert kind == "Tensor", name
            assert norm < EXACT, name
            assert distance < EXACT, name


@pytest.mark.parametrize("model", ["fsdp", "tp"])
def test_a_block_and_clipping_are_one_collective(ranks, model):
    for rank in ranks:
        assert rank[f"calls {model}"]["bytes"] == [[], [BOTH], []]
        assert rank[f"calls {model}"]["norm"] < 2e-7


def test_gradients_on_one_rank_alone(ranks):
    for rank in ranks:
        assert rank["one rank"] == {"norm": pytest.approx(0, abs=EXACT), "stepped": [True, True], "moved": True}


def test_a_flag_waits_for_the_next_block_or_for_a_state(ranks):
    for rank in ranks:
        found = rank["waiting"]
        assert found["scales"] == [START, START, START / 2, START / 4]
        assert found["moved"] == [False, False]
        assert found["saved"] == {"0": True}
        assert found["later"] == [NORM]  # of clipping


def test_a_flag_left_behind_moves_no_scale_and_stops_no_rank(ranks):
    for i, rank in enumerate(ranks):
        found = rank["left behind"]
        # The flag of before the load skips its step, and counts no more.
        assert found["loaded"] == {"loss_scale": 1024.0, "unskipped": 8}
        assert found["moved"] == [False, True]
        assert (found["optimizers"], found["waiting"]) == (2 - i, 0)


def test_clipping_finds_a_scale_that_differs(ranks):
    for i, rank in enumerate(ranks):
        error = rank["other scale"]["error"]
        assert error.startswith("clip_grad_norm_: loss scales differ between ranks.")
        assert f"rank {i} of a group of 2 ranks [0, 1], and has {[START, 1000.5][i]}." in error
        assert rank["other scale"]["same"]


def test_sums_still_to_be_made_of_which_a_rank_lacks_its_part(ranks):
    for rank in ranks:
        found = rank["lacking"]
        assert found["placements"] == "(Partial(sum),)"
        assert found["arrived"] < EXACT
        assert found["none"]
        assert found["moved"] == [True, True, False, True]
        assert found["ranks"] == 0.0
        assert found["norms"] == 1


@pytest.mark.full
@pytest.mark.parametrize("ranks_in_all", [4, 5])
def test_meshes_of_two_dimensions_on_four_ranks(tmp_path, ranks_in_all):
    # The default group has all ranks of the mesh and no others, or else each dimension needs a collective.
    calls = 1 if ranks_in_all == 4 else 2
    for rank in run_ranks("reliability/mesh_worker.py", ranks_in_all, tmp_path / "rendezvous")[:4]:
        for model in ("fsdp x tp", "hsdp"):
            assert rank[model]["bytes"] == [[], [BOTH] * calls, []]
            assert rank[model]["norm"] < 2e-7
        assert rank["fsdp over dp"]["bytes"] == [[], [BOTH], []]
        assert rank["fsdp over dp"]["norm"] < 2e-7
        for kind in ("SGD", "FusedAdam"):
            assert_trained(rank, f"run {kind}", EXACT)
        assert rank["inf in one shard"] == {"moved": [False], "scales": [START / 2], "norms": [float("inf")]}


def test_without_clipping_the_step_makes_that_collective(ranks):
    for rank in ranks:
        assert rank["calls fsdp unclipped"]["bytes"] == [[], [], [FLAG]]


def test_what_cannot_work_says_what_does(ranks):
    for rank in ranks:
        found = rank["errors"]
        assert "O3 without master weights does not work under fully_shard" in found["O3"]
        for level in ("O2", "O5"):
            assert "With tensor parallelism alone use O1 or O4" in found[level]
        for level in ("O2", "O3", "O5"):
            # Nothing has changed.
            assert found[f"{level} dtypes"] == ["torch.float32"]
            assert found[f"{level} step"] is False
        assert "multi_tensor_l2norm: tensors[0] is a DTensor: pass its to_local()" in found["multi_tensor_applier"]
        assert '"0.weight" is a DTensor of torch.float16' in found["16-bit"]
        assert found["replicas"] == 0.0
        for level in ("O2", "O5"):
            assert "ZeroRedundancyOptimizer would step it" in found[f"zero {level}"]
            assert "Use O1 or O4" in found[f"zero {level}"]
            assert found[f"zero {level} dtypes"] == ["torch.float32"]
