"""``state_dtype`` where ranks hold parts of parameters (fully_shard): steps, checkpoints of any number of ranks."""

import shutil

import pytest
from rank_processes import run_ranks

WORKER = "reliability/state_types_worker.py"
KINDS = ("8bit", "bf16", "mixed", "lamb", "novograd", "lion")
CODES = {"exp_avg": ("exp_avg_codes", "exp_avg_scales"), "exp_avg_sq": ("exp_avg_sq_codes", "exp_avg_sq_scales")}
CODED = {"8bit": 2, "bf16": 0, "mixed": 1, "lamb": 2, "novograd": 1, "lion": 1}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("state_types")


@pytest.fixture(scope="module")
def two(directory):
    return run_ranks(WORKER, 2, directory / "rendezvous", 60, "both", str(directory))


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_those_of_whole_tensors(two, kind):
    for number, rank in enumerate(two):
        found = rank[f"steps {kind}"]
        assert found["scales"]
        assert found["codes"] <= 1
        assert found["moved"]
        # Adam and Lion step by what they read, zeros; LAMB steps along the rounded averages.
        assert found["weights"] <= {"lamb": 0.05, "novograd": 1e-6}.get(kind, 0.0)
        assert found["averages"] < (0.02 if kind == "bf16" else 0.04)
        # LAMB and NovoGrad multiply by norms of the whole, to which other parts add other random bits.
        if number == 0 and kind not in ("lamb", "novograd"):
            assert found["as alone"]


def test_parts_are_rounded_by_other_random_bits_and_copies_by_the_same(two):
    for rank in two:
        assert 0.2 < rank["random bits"]["parts"] < 0.7
        assert rank["random bits"]["copies"] == 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_a_skipped_step_changes_no_byte(two, kind):
    for rank in two:
        assert rank[f"steps {kind}"]["skipped"]


@pytest.mark.parametrize("kind", KINDS)
def test_codes_go_by_the_size_of_the_whole_parameter(two, kind):
    coded = list(CODES)[: CODED[kind]]
    for rank in two:
        for name, keys in rank[f"steps {kind}"]["keys"].items():
            expected = set() if name == "small" else {key for of in coded for key in CODES[of]}
            assert {key for key in keys if key.endswith(("_codes", "_scales"))} == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_dict_has_codes_of_rows_of_whole_blocks_and_fp32_of_others(two, kind):
    for rank in two:
        saved = rank[f"steps {kind}"]["saved"]
        for of in list(CODES)[: CODED[kind]]:
            codes, scales = CODES[of]
            assert saved[f"rows {codes}"] == ["DTensor", "torch.int8" if of == "exp_avg" else "torch.uint8", [7, 128]]
            assert saved[f"rows {scales}"] == ["DTensor", "torch.float32", [7, 2]]
            for name, shape in (("cut", [9, 70]), ("flat", [1000]), ("small", [5, 64])):
                assert saved[f"{name} {of}"] == ["DTensor", "torch.float32", shape]
                assert f"{name} {codes}" not in saved
        if kind in ("bf16", "mixed"):
            assert saved["rows exp_avg_sq"] == ["DTensor", "torch.bfloat16", [7, 128]]


@pytest.mark.parametrize("kind", KINDS)
def test_training_resumes_bit_for_bit(two, kind):
    for rank in two:
        assert rank[f"resumes {kind}"]


def test_the_ranks_that_saved_resume_from_a_distributed_checkpoint(two):
    for rank in two:
        assert rank["loaded"] == {**rank["saved"], "off": 0.0}
        assert rank["saved"]["end"] != rank["saved"]["bits"]


def assert_loaded(found, saved):
    """Codes of whole rows, fp32 and weights to the bit; codes of rows that are cut otherwise to nearest."""
    exact = {key for key in saved if key in found and not key.startswith(("cut exp", "flat exp"))}
    assert {"rows exp_avg_codes", "rows exp_avg_scales", "rows exp_avg_sq_codes", "rows exp_avg_sq_scales"} < exact
    assert {key: found[key] for key in exact} == {key: saved[key] for key in exact}


def test_one_process_loads_what_two_ranks_saved(two):
    for rank in two:
        assert_loaded(rank["alone"]["digests"], rank["saved"]["digests"])
        assert "cut exp_avg_codes" in rank["alone"]["digests"]
        assert 0 < rank["alone"]["off"] < 0.008
    assert two[0]["alone"] == two[1]["alone"]


def test_a_state_by_names_goes_to_fp32_of_whole_tensors_and_back(two):
    for rank in two:
        found = rank["by names"]
        assert found.pop("dtypes") == ["torch.float32"]
        assert found == dict.fromkeys(("plain", "back", "sharded", "end"), True)


@pytest.mark.full
def test_four_ranks_load_what_two_saved(two, directory, tmp_path):
    shutil.copytree(directory / "dcp", tmp_path / "dcp")
    for rank in run_ranks(WORKER, 4, tmp_path / "rendezvous", 60, "load", str(tmp_path)):
        assert_loaded(rank["loaded"]["digests"], two[0]["saved"]["digests"])
        assert rank["loaded"]["off"] < 0.008
