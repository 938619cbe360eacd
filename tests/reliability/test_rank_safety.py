"""Ranks that differ say so, ranks without batches or gradients do not stop the others."""

import subprocess
import sys
import time

import pytest
import torch
from rank_processes import ROOT, environment, run_ranks

from ampctx import AmpError, AmpSession, AmpTypeError
from ampctx._collectives import device_for
from ampctx.distributed import lossy

START = 2.0**16


@pytest.fixture(scope="module")
def two(request, tmp_path_factory):
    rendezvous = tmp_path_factory.mktemp("two") / "rendezvous"
    more = ["full"] * request.config.getoption("full")
    return run_ranks("reliability/rank_safety_worker.py", 2, rendezvous, 60, *more)


@pytest.mark.parametrize("where", ["load", "check", "block O1", "block O2", "scaler"])
def test_loss_scales_that_differ_are_an_error_on_every_rank(two, where):
    for i, rank in enumerate(two):
        found = rank["scales"][where]
        assert "loss scales differ between ranks" in found["error"]
        assert f"rank {i} of a group of 2 ranks [0, 1], and has" in found["error"]
        assert str([START, 1024.0][i]) in found["error"]
        assert found["soon"]
        assert found.get("same", True)


def test_a_second_step_after_the_error_does_not_unscale_twice(two):
    assert [rank["scales"]["second try"] for rank in two] == [True, True]


def test_initialize_compares_loss_scales_before_it_changes_anything(two):
    for i, rank in enumerate(two):
        found = rank["scales"]["initialize"]
        assert "amp.initialize: loss scales differ between ranks" in found["error"]
        assert f"and has loss scales: {128 - i}.0 (static)" in found["error"]
        assert found["same"]


@pytest.mark.parametrize(
    ("case", "what", "has"),
    [
        ("count", "counts of clean steps", ["0", "3"]),
        ("level", "opt levels and options of amp.initialize and", ["O2", "O3"]),
        ("names", "names of parameters", ["6: a.0.weight", "6: 0.weight"]),
        ("shapes", "shapes of parameters and values of parameters", ["(2, 4), (2,)", "(3, 4), (3,)"]),
        ("master", "values of parameters", ["the checksum", "the checksum"]),
    ],
)
def test_check_ranks_names_what_differs_and_what_this_rank_has(two, case, what, has):
    for rank, mine in zip(two, has, strict=True):
        error = rank["others"][case]["error"]
        assert error.startswith(f"amp.check_ranks: {what}")
        assert f": {mine}" in error


@pytest.mark.parametrize("case", ["nothing", "count of a static scale", "parts", "a group of one"])
def test_check_ranks_is_silent_about_what_may_be(two, case):
    assert [rank["others"][case] for rank in two] == [{}, {}]


def test_check_ranks_finds_masters_that_one_rank_has_loaded(two):
    for rank in two:
        assert "values of parameters differ between ranks" in rank["loaded by one"]["error"]


def test_check_ranks_leaves_out_an_optimizer_that_no_rank_uses_any_more(two):
    assert [rank["former"] for rank in two] == [{"kept": 2}, {"kept": 1}]


def test_a_rank_that_amp_is_switched_off_on_alone_is_an_error_on_every_rank(two):
    for rank, level in zip(two, ("O2", "enabled=False"), strict=True):
        error = rank["scales"]["enabled"]["error"]
        assert "opt levels differ between ranks" in error
        assert f"opt levels: {level}" in error


def test_a_rank_without_gradients_takes_part_in_clipping_and_steps(two):
    for i, rank in enumerate(two):
        found = rank["no gradients"]
        assert {key: value for key, value in found.items() if not key.startswith("step")} == dict.fromkeys(
            [f"{what} {order}" for order in ("2.0", "3.0", "inf") for what in ("norm", "clipped")[: 2 - i]], True
        )
        assert found["step False"] == [True, i == 0, START]
        assert found["step True"] == [False, False, START / 2]


MORE_UNEVEN = ["O1 FusedAdam", "O2 SGD", "O2 Adam", "O5 FusedAdam", "O5 FusedAdam-split"]


@pytest.mark.parametrize(
    "run",
    [
        *("O1 Adam", "O2 FusedAdam", "O5 SGD", "from the start"),
        *(pytest.param(run, marks=pytest.mark.full) for run in MORE_UNEVEN),
    ],
)
def test_ranks_with_uneven_batches_have_the_same_state_after_each_epoch(two, run):
    first, second = (rank[f"uneven {run}"] for rank in two)
    assert first["states"] == second["states"]
    assert len(set(first["states"])) == 3
    assert first["steps"] == second["steps"]
    assert len(set(first["steps"])) >= len(first["steps"]) - 2 > 1  # skipped ones
    assert first["finite"]
    assert first["scale"] == second["scale"]
    assert first["scale"]["loss_scale"] == START / 2**4


def test_uneven_batches_with_two_optimizers(two):
    first, second = (rank["two optimizers"] for rank in two)
    assert first == second
    assert first[0] != first[1]


def test_state_travels_in_its_memory_format(two):
    for rank in two:
        numbers, same, strides = rank["formats"]
        assert numbers == [1, "a"]
        assert all(same)
        assert strides == [[27, 1, 9, 3], [18, 9, 3, 1], [9, 27, 3, 1]]


@pytest.mark.full
def test_uneven_batches_on_four_ranks(tmp_path):
    ranks = run_ranks("reliability/rank_safety_worker.py", 4, tmp_path / "rendezvous", 60)
    assert all(rank == ranks[0] for rank in ranks)
    assert len(set(ranks[0]["uneven"]["states"])) == 3


def test_join_of_the_model_alone_is_told_where_masters_are_left_behind(two):
    first, second = (rank["joined alone"] for rank in two)
    assert first == []
    assert len(second) == 1
    assert "changed in place" in second[0]
    assert "use Join([ddp, amp.joinable(optimizer)]) instead" in second[0]


def test_joins_that_cannot_work_are_refused(two):
    for rank in two:
        unknown, first, agrees = rank["refused"]
        assert "did not go through amp.initialize" in unknown
        assert "Put the model first: Join([ddp, amp.joinable(optimizer)])" in first
        assert "leave process_group out of amp.initialize" in agrees


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_one_overflow_of_compressed_gradients_is_one_skip(two, level):
    for rank in two:
        assert rank["compression"]["overflow, not wrapped"]["skipped"] > 1
        found = rank["compression"][f"overflow {level}"]
        assert (found["skipped"], found["scale"]) == (1, 512.0)
        assert found["dtypes"] == ["torch.float32"]
        assert 0 < found["largest"] < 1  # of gradients that are not scaled
    assert len({rank["compression"][f"overflow {level}"]["weights"] for rank in two}) == 1


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_the_error_of_a_compression_does_not_depend_on_the_scale(two, level):
    for rank in two:
        kept, doubled = rank["compression"][f"doubles {level}"]
        assert (kept["scale"], doubled["scale"]) == (1024.0, 2048.0)
        assert len(set(kept["errors"])) > 5
        assert kept["errors"] == doubled["errors"]
        assert kept["weights"] == doubled["weights"]


def test_compression_under_amp_at_o0_is_that_of_torch(two):
    for rank in two:
        torchs, wrapped, under_amp = rank["compression"]["without amp"]
        assert wrapped == torchs
        assert (under_amp["errors"], under_amp["weights"]) == (torchs["errors"], torchs["weights"])


def test_a_static_scale_can_skip_together_and_stay(two):
    for rank in two:
        expected = {"stepped": [True, True, False, True], "finite": True, "scale": 64.0}
        assert len(rank["static"]) == 8
        assert all(found == expected for found in rank["static"].values())


# --- without other ranks ----------------------------------------------------------------------------------------------


def started():
    session, model = AmpSession(), torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.initialize(model, optimizer, verbosity=0)
    return session, optimizer


def test_one_process_has_nothing_to_compare():
    session, _ = started()
    assert session.check_ranks() is None
    session.reset()


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda s, o: AmpSession().check_ranks(), AmpError, "check_ranks was called before amp.initialize"),
        (lambda s, o: s.check_ranks([0, 1]), AmpTypeError, "group must be a torch.distributed.ProcessGroup, got list"),
        (lambda s, o: s.load_state_dict(s.state_dict(), process_group=0), AmpTypeError, "process_group must be"),
        (lambda s, o: s.joinable(o), AmpError, "amp.joinable needs torch.distributed. Call dist.init_process_group"),
        (lambda s, o: lossy(None, "hook", o), AmpTypeError, "hook must be callable"),
        (lambda s, o: lossy(None, print, None), AmpTypeError, "optimizer must be an optimizer, got NoneType"),
        (
            lambda s, o: AmpSession().initialize(torch.nn.Linear(1, 1), skip_nonfinite="yes"),
            AmpTypeError,
            "skip_nonfinite must be True or False, got str",
        ),
    ],
)
def test_wrong_calls_name_what_is_wrong(call, kind, message):
    session, optimizer = started()
    with pytest.raises(kind, match=message):
        call(session, optimizer)
    session.reset()


@pytest.mark.parametrize(
    ("backends", "expected"),
    [("cpu:gloo,cuda:nccl", "cpu"), ("cuda:nccl", "cuda"), ("cpu:gloo", "cpu"), ("xpu:xccl,cuda:nccl", "xpu")],
)
def test_numbers_on_the_cpu_go_to_a_device_that_the_group_takes(backends, expected):
    assert device_for(backends, torch.device("cpu")) == torch.device(expected)


@pytest.mark.full
@pytest.mark.parametrize("point", ["before the block", "in the block", "after backward", "in the exit"])
def test_every_rank_ends_after_one_has_raised(tmp_path, point):
    worker = str(ROOT / "tests" / "reliability" / "raising_worker.py")
    command = [sys.executable, worker, str(tmp_path / "rendezvous"), "2"]
    began = time.monotonic()
    ranks = [
        subprocess.Popen([*command, str(rank), point], env=environment(), stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=25)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode != 0 for rank in ranks)
    assert time.monotonic() - began < 25
    assert (
        "AmpRankError: the end of an amp.scale_loss block: a collective failed on rank 0 of a group of 2" in errors[0]
    )
    assert ("layout" if point == "in the exit" else f"ValueError: rank 1 raises {point}") in errors[1]


def flat(value):
    """The leaves of a nested state, by their paths."""
    if isinstance(value, (dict, list)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {f"{key}.{path}": leaf for key, part in items for path, leaf in flat(part).items()}
    return {"": value}


@pytest.mark.full
def test_a_run_that_torchrun_restarts_ends_with_the_bits_of_one_that_nothing_ended(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ends = []
    for name, killed_at in (("whole", -1), ("killed", 5)):
        folder = tmp_path / name
        folder.mkdir()
        worker = [str(ROOT / "tests" / "reliability" / "restart_worker.py"), str(folder), str(killed_at)]
        done = subprocess.run(
            [*torchrun, "--max-restarts", "1", *worker], env=environment(), capture_output=True, text=True, timeout=90
        )
        assert done.returncode == 0, done.stderr
        assert (folder / "killed").exists() == (killed_at >= 0)
        ends += [flat(torch.load(folder / f"end{rank}.pt", weights_only=True)) for rank in range(2)]
    for other in ends[1:]:
        assert other.keys() == ends[0].keys()
        for path, leaf in other.items():
            same = torch.equal if isinstance(leaf, torch.Tensor) else lambda a, b: a == b
            assert same(leaf, ends[0][path]), path
