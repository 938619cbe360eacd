"""skip_nonfinite and skip_norm_above: a skipped step changes nothing, and is known by its outcome."""

from __future__ import annotations

import logging

import pytest
import torch
from host_reads import HostReads
from kit import COPIES, assert_same, mlp, params_of, snapshot, through_a_file
from optimizer_cases import STEPPED_BY, give, gradients, parameters
from rank_processes import RANK, all_ranks, flat_mesh, on_ranks
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import Shard, distribute_tensor

import ampctx
from ampctx import AmpError, AmpTypeError, AmpValueError, clip_grad_norm_
from ampctx.amp import AmpSession
from ampctx.optimizers import LARC, FusedAdam, FusedSGD, SplitMasters

INF, NAN = float("inf"), float("nan")
GUARDED = [name for name in STEPPED_BY if name != "larc"]
# A step with such gradients is skipped, but the first.
BAD = {"inf": INF, "nan": NAN, "-inf": -INF, "large": 1e4}


def spoilt(params, step, value):
    grads = gradients(params, step)
    grads[-1].view(-1)[0] = value
    return grads


def run_beside(guarded, plain, value, steps=5, bad=(1, 3)):
    """Steps both on the same gradients; the plain one leaves out those that are bad."""
    for step in range(steps):
        params = params_of(guarded)
        give(params, spoilt(params, step, value) if step in bad else gradients(params, step))
        guarded.step()
        if step not in bad:
            give(params_of(plain), gradients(params, step))
            plain.step()
        assert guarded.outcome.skipped == (step in bad)
        assert_same(snapshot(guarded), snapshot(plain))


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("name", GUARDED)
def test_a_skipped_step_changes_nothing(name, value):
    options = {"skip_norm_above": 100.0} if value == "large" else {"skip_nonfinite": True}
    guarded, plain = STEPPED_BY[name](parameters(), **options), STEPPED_BY[name](parameters())
    run_beside(guarded, plain, BAD[value])
    assert guarded.skipped_steps() == 2


def test_outcomes(caplog):
    caplog.set_level(logging.WARNING, "ampctx")
    model = mlp()
    optimizer = FusedAdam(model.named_parameters(), lr=0.1, skip_norm_above=100.0)
    assert repr(optimizer.outcome) == "StepOutcome(no step yet)"
    assert optimizer.skipped_steps() == 0
    params = params_of(optimizer)
    outcomes = []
    for step, value in enumerate((0.0, INF, 1e4, 0.0)):
        give(params, spoilt(params, step, value) if value else gradients(params, step))
        norm = torch.cat([p.grad.flatten() for p in params]).norm()
        optimizer.step()
        outcomes.append(optimizer.outcome)
        assert optimizer.outcome.grad_norm == pytest.approx(norm.item(), rel=1e-6)
        if value == INF:
            assert [(each.name, each.inf, each.nan) for each in optimizer.outcome.culprits] == [("3.bias", 1, 0)]
    assert [each.reason for each in outcomes] == [None, "overflow", "found_inf", None]
    assert [each.overflowed for each in outcomes] == [(), (0,), (), ()]
    assert [each.culprits for each in outcomes[2:]] == [(), ()]
    said = [message.partition(" so far")[0] for message in caplog.messages]
    assert said == [f"FusedAdam: {number} steps skipped" for number in ("1 of 2", "2 of 3")]


def test_steps_need_no_host_sync():
    optimizer = FusedAdam(parameters(), lr=0.1, skip_nonfinite=True)
    params = params_of(optimizer)
    for step in range(3):
        give(params, spoilt(params, step, NAN) if step == 1 else gradients(params, step))
        with HostReads() as reads:
            optimizer.step()
        assert reads.count == 0


@pytest.mark.parametrize("clip", [clip_grad_norm_, torch.nn.utils.clip_grad_norm_])
def test_the_norm_before_a_clip_counts(clip):
    optimizer = FusedSGD(parameters(), lr=0.1, skip_norm_above=100.0)
    params = params_of(optimizer)
    give(params, spoilt(params, 0, 1e4))
    norm = clip(params, 1.0)
    optimizer.step()
    # torch's leaves no word of it.
    assert optimizer.outcome.skipped == (clip is clip_grad_norm_)
    now = norm.item() if clip is clip_grad_norm_ else 1.0
    assert optimizer.outcome.grad_norm == pytest.approx(now, rel=1e-5)


def test_a_norm_before_a_clip_counts_once():
    """For a second try of its step, and for no later one, whose gradients are in the same memory."""
    optimizer = FusedSGD(parameters(), lr=0.1, skip_norm_above=100.0)
    params = params_of(optimizer)
    give(params, spoilt(params, 0, 1e4))
    clip_grad_norm_(params, 1.0)
    rate, optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"], "fast"
    with pytest.raises(AmpTypeError, match="lr must be a number"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = rate
    optimizer.step()
    assert optimizer.outcome.skipped
    params[0].grad = None
    for p, grad in zip(params[1:], gradients(params, 1)[1:], strict=True):
        p.grad.copy_(grad)
    optimizer.step()
    assert optimizer.outcome.stepped
    # One list after the other, and a clip of gradients that nobody steps.
    give(params, spoilt(params, 2, 1e4))
    clip_grad_norm_(params[:1], 1.0)
    clip_grad_norm_(params[1:], 1.0)
    optimizer.step()
    assert optimizer.outcome.skipped


def test_culprits_are_those_of_the_step():
    optimizer = FusedSGD(parameters(), lr=0.1, skip_nonfinite=True)
    params = params_of(optimizer)
    for in_place in (True, False):
        give(params, spoilt(params, 0, NAN))
        optimizer.step()
        outcome = optimizer.outcome
        optimizer.zero_grad(not in_place)
        assert outcome.skipped
        assert outcome.culprits == ()


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", ["adam", "offload", "split-masters"])
def test_copies_have_the_guard(name, how):
    optimizer = STEPPED_BY[name](parameters(), skip_nonfinite=True)
    params = params_of(optimizer)
    give(params, spoilt(params, 0, NAN))
    optimizer.step()
    other = COPIES[how](optimizer)
    give(params_of(other), spoilt(params_of(other), 1, NAN))
    other.step()
    assert (optimizer.skipped_steps(), other.skipped_steps()) == (1, 2)
    assert optimizer.outcome is not other.outcome


@pytest.mark.parametrize("name", ["adam", "split-masters"])
def test_a_checkpoint_has_the_count(name):
    optimizer, other = (STEPPED_BY[name](parameters(), skip_nonfinite=True) for _ in range(2))
    for one, times in ((optimizer, 2), (other, 1)):
        for step in range(times):
            give(params_of(one), spoilt(params_of(one), step, NAN))
            one.step()
    saved = through_a_file(optimizer.state_dict())
    other.load_state_dict(saved)
    assert other.skipped_steps() == 2
    give(params_of(other), spoilt(params_of(other), 1, NAN))
    other.step()
    assert other.skipped_steps() == 3
    for wrong, error in (("2", AmpTypeError), (-1, AmpValueError)):
        with pytest.raises(error, match=r'state_dict\["param_groups"\]\[0\]\["skipped_steps"\]'):
            other.load_state_dict({**saved, "param_groups": [{**saved["param_groups"][0], "skipped_steps": wrong}]})
    assert other.skipped_steps() == 3
    without = STEPPED_BY[name](parameters())
    without.load_state_dict(saved)
    assert not any("skipped_steps" in group for group in without.state_dict()["param_groups"])
    other.load_state_dict(without.state_dict())
    assert other.skipped_steps() == 0


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
@pytest.mark.parametrize("flat", [False, True])
def test_checkpoints_of_torch_distributed_have_the_count(tmp_path, flat):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    runs = [(model := mlp(), FusedAdam(model.parameters(), skip_nonfinite=True)) for _ in range(2)]
    for step in range(3):
        give(params_of(runs[0][1]), spoilt(params_of(runs[0][1]), step, NAN if step else 1.0))
        runs[0][1].step()
    found = [dict(zip(("model", "optim"), get_state_dict(*run, options=options), strict=True)) for run in runs]
    dcp.save(found[0], checkpoint_id=tmp_path)
    dcp.load(found[1], checkpoint_id=tmp_path)
    set_state_dict(*runs[1], model_state_dict=found[1]["model"], optim_state_dict=found[1]["optim"], options=options)
    assert [optimizer.skipped_steps() for _, optimizer in runs] == [2, 2]
    session = AmpSession()
    session.initialize(mlp(), [], verbosity=0, enabled=False)
    named = session.get_state_dict(*runs[0])
    optimizer = FusedAdam(runs[1][0].parameters(), skip_nonfinite=True)
    session.set_state_dict(runs[1][0], optimizer, named)
    assert optimizer.skipped_steps() == 2


WRONG = [
    ({"skip_norm_above": -1.0}, AmpValueError, "Invalid skip_norm_above value: -1.0"),
    ({"skip_norm_above": "10"}, AmpTypeError, "skip_norm_above must be a number, got str"),
    ({"skip_norm_above": NAN}, AmpValueError, "Invalid skip_norm_above value: nan"),
    ({"skip_nonfinite": "yes"}, AmpTypeError, "skip_nonfinite must be True or False, got 'yes'"),
    ({"skip_nonfinite": True, "process_group": 1}, AmpTypeError, "process_group must be a torch.distributed.Proc"),
    ({"process_group": 1}, AmpValueError, "process_group is for skip_nonfinite and skip_norm_above"),
]


@pytest.mark.parametrize(("options", "kind", "message"), WRONG)
@pytest.mark.parametrize(
    "make", [FusedAdam, lambda params, **options: SplitMasters(torch.optim.SGD, params, **options)]
)
def test_wrong_arguments(make, options, kind, message):
    with pytest.raises(kind, match=message):
        make(parameters(), **options)


def test_groups_and_larc_refuse_them():
    with pytest.raises(AmpTypeError, match="skip_nonfinite is an argument of FusedAdam, not of a param group"):
        FusedAdam([{"params": parameters(), "skip_nonfinite": True}])
    with pytest.raises(AmpError, match="LARC adapts gradients before FusedSGD could compare"):
        LARC(FusedSGD(parameters(), lr=0.1, skip_norm_above=1.0))


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, LARC], ids=["", "LARC"])
@pytest.mark.parametrize("level", ["O0", "O2"])
def test_amp_refuses_them(level, wrap):
    model = mlp()
    optimizer = wrap(FusedAdam(model.parameters(), skip_nonfinite=True))
    with pytest.raises(AmpError, match=r"optimizers\[0\] \(\w+\) has skip_nonfinite or skip_norm_above"):
        AmpSession().initialize(model, optimizer, opt_level=level)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, ampctx.GradScaler])
def test_a_scaler_must_unscale_before(kind):
    optimizer, before = FusedSGD(parameters(), lr=0.1, skip_nonfinite=True), parameters()
    for unscales in (True, False):
        scaler = kind("cpu", init_scale=2.0)
        scaler.scale(torch.ones(()))
        give(params_of(optimizer), gradients(before, 0))
        if unscales:
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            assert optimizer.outcome.stepped
    after = snapshot(optimizer)
    with pytest.raises(AmpError, match=r"Call scaler.unscale_\(optimizer\) before"):
        scaler.step(optimizer)
    assert_same(snapshot(optimizer), after)


# --- over ranks -------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_ranks_of_dtensors_skip_together():
    for value, options in ((NAN, {"skip_nonfinite": True}), (1e4, {"skip_norm_above": 100.0})):
        mesh, alone = flat_mesh(), FusedAdam(parameters(), lr=0.1)
        spread = [
            nn.Parameter(distribute_tensor(p.detach().clone(), mesh, [Shard(0)]))
            for p in parameters(shapes=[(7, 3), (4,)])
        ]
        optimizer, alone = FusedAdam(spread, lr=0.1, **options), FusedAdam(parameters(shapes=[(7, 3), (4,)]), lr=0.1)
        for step in range(4):
            grads = gradients(params_of(alone), step)
            if step == 1:
                grads[1][3] = value  # of the second rank
            give(spread, [distribute_tensor(grad, mesh, [Shard(0)]) for grad in grads])
            optimizer.step()
            if step != 1:
                give(params_of(alone), grads)
                alone.step()
            assert all_ranks(optimizer.outcome.skipped) == [step == 1] * 2
            assert_same([p.full_tensor() for p in spread], params_of(alone))


@on_ranks(2)
def test_what_only_one_rank_knows_skips_on_all():
    """A plain parameter beside a DTensor, a norm before a clip of this rank's parameters, a flag."""
    mesh, group = flat_mesh(), torch.distributed.group.WORLD
    for case in ("plain", "clip", "flag"):
        plain = nn.Parameter(torch.ones(2))
        spread = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
        optimizer = FusedSGD([plain, spread] if case != "clip" else [plain], lr=0.1, skip_norm_above=100.0,
                             process_group=group if case == "clip" else None)  # fmt: skip
        plain.grad = torch.ones(2)
        spread.grad = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        if RANK == 1:
            plain.grad[0] = {"plain": NAN, "clip": 1e4, "flag": 1.0}[case]
            if case == "flag":
                optimizer.found_inf = torch.ones(())
        if case == "clip":
            clip_grad_norm_([plain], 1.0)
        optimizer.step()
        assert all_ranks(optimizer.outcome.skipped) == [True, True], case
        assert_same([plain, spread.full_tensor()], [torch.ones(2), torch.ones(4)])


@on_ranks(2)
def test_ranks_of_a_group_skip_together():
    """Two stages of a pipeline. At the last step the first one has no gradient."""
    group = torch.distributed.group.WORLD
    optimizer = FusedSGD(parameters(seed=RANK), lr=0.1, skip_norm_above=20.0, process_group=group)
    params, skipped = params_of(optimizer), []
    for step in range(4):
        grads = gradients(params, step) if RANK or step < 3 else [None] * len(params)
        if step == 1 and RANK == 1:
            grads[0][0, 0] = INF
        if step == 2:
            grads[0][0, 0] = 15.0  # 21.2 of both
        give(params, grads)
        optimizer.step()
        skipped.append(optimizer.outcome.skipped)
    assert all_ranks(skipped) == [[False, True, True, False]] * 2
    with pytest.raises(AmpError, match="a FusedSGD with a process_group cannot be copied or pickled"):
        COPIES["deepcopy"](optimizer)
