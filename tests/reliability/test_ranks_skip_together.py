"""Ranks that hold different parameters skip a step together, and their loss scales stay equal."""

import copy
import pickle

import pytest
import torch
from rank_processes import run_ranks
from torch import nn

from ampctx import AmpError, AmpTypeError, AmpValueError
from ampctx.amp import AmpSession, GradScaler

START = 2.0**16
SKIPPED = {"moved": [True, True, False, True, True], "skipped": 1}
# The scale falls at the third of five steps.
MOVED_SCALE = {"scale": START / 2, "unskipped": 2}
HELD_SCALE = {"scale": START, "unskipped": 0}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return run_ranks("reliability/agreement_worker.py", 2, tmp_path_factory.mktemp("two") / "rendezvous")


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return run_ranks("reliability/agreement_worker.py", 4, tmp_path_factory.mktemp("four") / "rendezvous")


@pytest.mark.full(but=4)
@pytest.mark.parametrize("kind", ["plain", "torch-fused", "foreach", "ampctx"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_inf_on_one_rank_skips_on_both(two, level, kind):
    for rank in two:
        assert rank[f"{level} {kind}"] == SKIPPED | MOVED_SCALE


@pytest.mark.parametrize("kind", ["plain", "ampctx"])
@pytest.mark.parametrize("body", ["delayed", "ended_by_the_step", "ended_by_the_step_of_a_rank_without_gradients"])
def test_delayed_blocks_agree(two, body, kind):
    for rank in two:
        result = rank[f"{body} {kind}"]
        if "without_gradients" in body and rank is two[0]:
            assert result["moved"] == [False] * 5
            assert (result["skipped"], result["scale"], result["unskipped"]) == (1, START / 2, 2)
        else:
            assert result == SKIPPED | MOVED_SCALE


@pytest.mark.parametrize("kind", ["plain", "ampctx"])
def test_a_verdict_left_to_a_later_block_is_that_of_all_ranks(two, kind):
    for rank in two:
        assert rank[f"judged_later {kind}"] == SKIPPED | MOVED_SCALE


@pytest.mark.parametrize("kind", ["plain", "ampctx"])
def test_gradients_judged_at_the_step_agree(two, kind):
    for rank in two:
        assert rank[f"outside {kind}"] == SKIPPED | HELD_SCALE


@pytest.mark.parametrize("kind", ["plain", "ampctx"])
def test_a_rank_without_gradients_takes_part(two, kind):
    assert two[0][f"outside_on_one_rank {kind}"] == {"moved": [False] * 5, "skipped": 1} | HELD_SCALE
    assert two[1][f"outside_on_one_rank {kind}"] == SKIPPED | HELD_SCALE


@pytest.mark.parametrize("kind", ["plain", "ampctx"])
def test_gradients_of_a_plain_backward_after_a_block_agree(two, kind):
    for rank in two:
        assert rank[f"inside_and_outside {kind}"] == SKIPPED | {"scale": START, "unskipped": 5}


def test_without_a_group_each_rank_decides_for_itself(two):
    assert two[0]["alone"] == {"moved": [True] * 5, "skipped": 0, "scale": START, "unskipped": 5}
    assert two[1]["alone"] == SKIPPED | MOVED_SCALE
    assert [rank["scaler alone"]["scale"] for rank in two] == [START, START / 2]


def test_losses_agree_each_on_its_own(two):
    for rank in two:
        assert rank["two losses"] == {
            "moved": [[True, True], [True, True], [False, True], [True, True], [True, True]],
            "skipped": [1, 0],
            "state": {
                "loss_scaler0": {"loss_scale": START / 2, "unskipped": 2},
                "loss_scaler1": {"loss_scale": START, "unskipped": 5},
            },
        }


@pytest.mark.parametrize("kind", ["plain", "unscale_", "torch-fused", "ampctx"])
def test_grad_scalers_agree(two, kind):
    for rank in two:
        assert rank[f"scaler {kind}"] == {**SKIPPED, "skipped": 0, **MOVED_SCALE}


def test_a_grad_scaler_without_gradients_takes_part(two):
    first, second = (rank["scaler without gradients"] for rank in two)
    assert first == {"moved": [False] * 5, "skipped": 0, **MOVED_SCALE}
    assert second == {**SKIPPED, "skipped": 0, **MOVED_SCALE}


def test_an_exit_is_one_collective_and_its_step_none(two):
    for rank in two:
        assert rank["calls"] == [1, 0, 0]


def test_a_rank_that_stays_away_is_a_timeout_and_no_step(two):
    left = "the end of an amp.scale_loss block: a collective failed on rank 0 of a group of 2 ranks [0, 1], which has"
    assert two[0]["stays away"] == {"exit": f"{left} a found_inf flag", "scale": START}


@pytest.mark.full
def test_four_ranks_agree(four):
    for rank in four:
        assert rank["world"] == SKIPPED | MOVED_SCALE


@pytest.mark.full
def test_groups_agree_each_on_its_own(four):
    for i, rank in enumerate(four):
        clean = {"moved": [True] * 5, "skipped": 0, "scale": START, "unskipped": 5}
        assert rank["pairs"] == (SKIPPED | MOVED_SCALE if i < 2 else clean)


@pytest.mark.full
def test_a_group_without_this_rank_is_refused(four):
    for rank in four:
        assert "process_group does not contain this rank" in rank["error"]


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.fixture
def group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'one'}", rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


def test_what_is_no_group_is_refused_and_nothing_changed():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for make in (
        lambda value: AmpSession().initialize(model, optimizer, opt_level="O2", verbosity=0, process_group=value),
        lambda value: GradScaler("cpu", process_group=value),
    ):
        with pytest.raises(AmpTypeError, match="process_group must be a torch.distributed.ProcessGroup, got list"):
            make([0, 1])
        with pytest.raises(AmpValueError, match="does not contain this rank"):
            make(torch.distributed.GroupMember.NON_GROUP_MEMBER)
    assert model.weight.dtype == torch.float32
    assert optimizer.param_groups[0]["params"][0] is model.weight
    assert "step" not in vars(optimizer)


def test_it_is_a_keyword(group):
    with pytest.raises(TypeError, match="positional argument"):
        GradScaler("cpu", 2.0, 2.0, 0.5, 2000, True, group)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickle.dumps], ids=["copy", "pickle"])
def test_a_scaler_with_a_group_says_that_it_cannot_be_pickled(group, duplicate):
    scaler = GradScaler("cpu", process_group=group)
    with pytest.raises(AmpError, match="belongs to this process. Save its state_dict"):
        duplicate(scaler)
    assert GradScaler("cpu").load_state_dict(scaler.state_dict()) is None


def test_a_static_scale_needs_no_collective(group, monkeypatch):
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *args, **kwargs: pytest.fail("a collective"))
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = AmpSession()
    session.initialize(model, optimizer, opt_level="O2", loss_scale=128.0, verbosity=0, process_group=group)
    with session.scale_loss(model(torch.ones(1, 2)).float().sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    session.reset()
