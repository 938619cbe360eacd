"""Ranks that hold different parameters, as under tensor parallelism, skip a step together, and their loss scales stay
equal."""

import copy
import datetime
import pickle

import pytest
import torch
import torch.distributed as dist
from kit import backward
from rank_processes import RANK, counted_all_reduce, on_ranks
from stepping import KINDS
from torch import nn

from ampctx import AmpError, AmpRankError, AmpTypeError, AmpValueError
from ampctx.amp import AmpSession, GradScaler

START = 2.0**16
OVERFLOW_AT = 2
SKIPPED = {"moved": [True, True, False, True, True], "skipped": 1}
# The scale falls at the third of five steps.
MOVED_SCALE = {"scale": START / 2, "unskipped": 2}
HELD_SCALE = {"scale": START, "unskipped": 0}
NOT_SKIPPED = {"moved": [True] * 5, "skipped": 0, "scale": START, "unskipped": 5}


def shard() -> nn.Module:
    """Of another size on each rank."""
    torch.manual_seed(RANK)
    return nn.Linear(4, 3 + RANK)


def loss_of(model, overflow=False):
    """An overflow is one of rank 1."""
    loss = model(torch.full((2, 4), 0.5)).float().square().mean()
    return loss * float("inf") if overflow and RANK == 1 else loss


def weights(model):
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def session_of(model, optimizer, level, group, **options):
    session = AmpSession()
    options = {"loss_scale": "dynamic", "verbosity": 0, **options}
    session.initialize(model, optimizer, opt_level=level, process_group=group, **options)
    return session


def one_block(session, model, optimizer, overflow, **options):
    backward(session, loss_of(model, overflow), optimizer, **options)


def trained(body=one_block, kind="plain", level="O2", group=None) -> dict:
    """What became of five steps; ``body`` makes the gradients of one."""
    model = shard()
    optimizer = KINDS[kind](model.parameters())
    session = session_of(model, optimizer, level, group)
    moved = []
    for step in range(5):
        before = weights(model)
        optimizer.zero_grad()
        body(session, model, optimizer, step == OVERFLOW_AT)
        optimizer.step()
        moved.append(not torch.equal(weights(model), before))
    state, skipped = session.state_dict()["loss_scaler0"], session.skipped_steps(optimizer)
    session.reset()
    return {"moved": moved, "skipped": skipped, "scale": state["loss_scale"], "unskipped": state["unskipped"]}


@pytest.mark.full(but=4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", ["O1", "O2"])
@on_ranks(2)
def test_inf_on_one_rank_skips_on_both(level, kind):
    assert trained(one_block, kind, level, dist.group.WORLD) == SKIPPED | MOVED_SCALE


def delayed(session, model, optimizer, overflow):
    """The second of three backward passes overflows; the third judges the sum."""
    for i in range(3):
        backward(session, loss_of(model, overflow and i == 1) / 3, optimizer, delay_unscale=i < 2)


def ended_by_the_step(session, model, optimizer, overflow):
    one_block(session, model, optimizer, overflow, delay_unscale=True)


def ended_by_the_step_of_a_rank_without_gradients(session, model, optimizer, overflow):
    one_block(session, model, optimizer, overflow, delay_unscale=True)
    if RANK == 0:
        model.zero_grad()


def judged_later(session, model, optimizer, overflow):
    """The first block leaves its flag to the second."""
    one_block(session, model, optimizer, overflow, delay_overflow_check=True)
    one_block(session, model, optimizer, False)


def outside(session, model, optimizer, overflow):
    """No block at all: the step judges what it finds in the model's 16-bit gradients."""
    loss_of(model, overflow).backward()


def outside_on_one_rank(session, model, optimizer, overflow):
    """As with experts that got no tokens: rank 0 has no gradients."""
    if RANK == 1:
        loss_of(model, overflow).backward()


def inside_and_outside(session, model, optimizer, overflow):
    one_block(session, model, optimizer, False)
    loss_of(model, overflow).backward()


NEVER_MOVED = {"moved": [False] * 5, "skipped": 1}
# What each rank comes to.
BODIES = {
    delayed: [SKIPPED | MOVED_SCALE] * 2,
    ended_by_the_step: [SKIPPED | MOVED_SCALE] * 2,
    ended_by_the_step_of_a_rank_without_gradients: [NEVER_MOVED | MOVED_SCALE, SKIPPED | MOVED_SCALE],
    judged_later: [SKIPPED | MOVED_SCALE] * 2,
    outside: [SKIPPED | HELD_SCALE] * 2,
    outside_on_one_rank: [NEVER_MOVED | HELD_SCALE, SKIPPED | HELD_SCALE],
    inside_and_outside: [SKIPPED | {"scale": START, "unskipped": 5}] * 2,
}


@pytest.mark.full(but=7)
@pytest.mark.parametrize("kind", ["plain", "ampctx"])
@pytest.mark.parametrize("body", BODIES)
@on_ranks(2)
def test_wherever_gradients_are_judged_ranks_agree(body, kind):
    assert trained(body, kind, group=dist.group.WORLD) == BODIES[body][RANK]


@on_ranks(2)
def test_without_a_group_each_rank_decides_for_itself():
    assert trained() == (SKIPPED | MOVED_SCALE if RANK else NOT_SKIPPED)
    assert scaled_by_a_scaler("plain", None)["scale"] == (START / 2 if RANK else START)


@on_ranks(2)
def test_losses_agree_each_on_its_own():
    """Two optimizers and losses; the loss of the first overflows."""
    models = [shard(), shard()]
    both = [KINDS["plain"](model.parameters()) for model in models]
    session = session_of(models, both, "O2", dist.group.WORLD, num_losses=2)
    moved = []
    for step in range(5):
        before = [weights(model) for model in models]
        for i, (model, optimizer) in enumerate(zip(models, both, strict=True)):
            optimizer.zero_grad()
            one_block(session, model, optimizer, i == 0 and step == OVERFLOW_AT, loss_id=i)
        for optimizer in both:
            optimizer.step()
        moved.append([not torch.equal(weights(m), b) for m, b in zip(models, before, strict=True)])
    assert moved == [[True, True], [True, True], [False, True], [True, True], [True, True]]
    assert [session.skipped_steps(optimizer) for optimizer in both] == [1, 0]
    assert session.state_dict() == {
        "loss_scaler0": {"loss_scale": START / 2, "unskipped": 2},
        "loss_scaler1": {"loss_scale": START, "unskipped": 5},
    }
    session.reset()


def scaled_by_a_scaler(kind, group, unscale=False, gradients_on_rank_0=True) -> dict:
    model = shard()
    optimizer = KINDS[kind](model.parameters())
    scaler = GradScaler("cpu", process_group=group)
    moved = []
    for step in range(5):
        before = weights(model)
        optimizer.zero_grad()
        loss = scaler.scale(loss_of(model, step == OVERFLOW_AT))
        if gradients_on_rank_0 or RANK > 0:
            loss.backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        moved.append(not torch.equal(weights(model), before))
    state = scaler.state_dict()
    return {"moved": moved, "scale": state["scale"], "unskipped": state["_growth_tracker"]}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *(("plain", {}), ("plain", {"unscale": True}), ("torch-fused", {}), ("ampctx", {})),
        ("plain", {"gradients_on_rank_0": False}),
    ],
)
@on_ranks(2)
def test_grad_scalers_agree(kind, options):
    moves = NEVER_MOVED if "gradients_on_rank_0" in options and RANK == 0 else SKIPPED
    assert scaled_by_a_scaler(kind, dist.group.WORLD, **options) == {"moved": moves["moved"], **MOVED_SCALE}


@on_ranks(2)
def test_an_exit_is_one_collective_and_its_step_none():
    """And a delayed block none."""
    models = [shard(), shard()]
    both = [KINDS["plain"](model.parameters()) for model in models]
    session = session_of(models, both, "O2", dist.group.WORLD)
    counts = []
    with counted_all_reduce() as calls:
        backward(session, loss_of(models[0]) + loss_of(models[1]), both)
        counts.append(len(calls))
        both[0].step()
        one_block(session, models[0], both[0], False, delay_unscale=True)
        counts.append(len(calls))
    session.reset()
    assert counts == [1, 1]


@on_ranks(2)
def test_a_rank_that_stays_away_is_a_timeout_and_no_step():
    """Rank 1 takes no part in an exit: rank 0 gets an error, and cannot step on gradients that were not judged."""
    group = dist.new_group()
    model = shard()
    optimizer = KINDS["plain"](model.parameters())
    session = session_of(model, optimizer, "O2", group)
    if RANK == 0:
        # Private: torch has no public way to shorten it after initialize, where both take part however busy they are.
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=2), group)
        left = "the end of an amp.scale_loss block: a collective failed on rank 0 of a group of 2 ranks [0, 1], which"
        with pytest.raises(AmpRankError) as caught:
            one_block(session, model, optimizer, False)
        assert str(caught.value).partition(". Another rank")[0] == f"{left} has a found_inf flag"
        with pytest.raises(AmpError):
            optimizer.step()
        assert session.state_dict()["loss_scaler0"]["loss_scale"] == START
    session.reset()


@pytest.mark.full
@on_ranks(4)
def test_four_ranks_and_pairs_of_them():
    """Groups agree each on its own, and one without this rank is refused."""
    assert trained(one_block, "ampctx", group=dist.group.WORLD) == SKIPPED | MOVED_SCALE
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    assert trained(group=pairs[RANK // 2]) == (SKIPPED | MOVED_SCALE if RANK < 2 else NOT_SKIPPED)
    with pytest.raises(AmpValueError, match="process_group does not contain this rank"):
        GradScaler("cpu", process_group=pairs[1 - RANK // 2])


# --- arguments --------------------------------------------------------------------------------------------------------


def test_what_is_no_group_is_refused_and_nothing_changed():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for make in (
        lambda value: session_of(model, optimizer, "O2", value),
        lambda value: GradScaler("cpu", process_group=value),
    ):
        with pytest.raises(AmpTypeError, match="process_group must be a torch.distributed.ProcessGroup, got list"):
            make([0, 1])
        with pytest.raises(AmpValueError, match="does not contain this rank"):
            make(dist.GroupMember.NON_GROUP_MEMBER)
    assert model.weight.dtype == torch.float32
    assert optimizer.param_groups[0]["params"][0] is model.weight
    assert "step" not in vars(optimizer)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickle.dumps], ids=["copy", "pickle"])
def test_a_scaler_with_a_group_says_that_it_cannot_be_pickled(mesh, duplicate):
    scaler = GradScaler("cpu", process_group=dist.group.WORLD)
    with pytest.raises(AmpError, match="belongs to this process. Save its state_dict"):
        duplicate(scaler)
    assert GradScaler("cpu").load_state_dict(scaler.state_dict()) is None


def test_a_static_scale_needs_no_collective(mesh, monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", lambda *args, **kwargs: pytest.fail("a collective"))
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = session_of(model, optimizer, "O2", dist.group.WORLD, loss_scale=128.0)
    backward(session, model(torch.ones(1, 2)).float().sum(), optimizer)
    optimizer.step()
    session.reset()
