"""Whether a step was taken or skipped, and why, is known after it, for every kind of optimizer."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from host_reads import HostReads
from kit import INF, NAN, assert_same, backward, loss_of, with_plans
from stepping import ON_DEVICE, ON_HOST, Loop, ScalerLoop, every_optimizer, few_levels, network, one_of_each
from tape import Tape

from ampctx import AmpError, AmpTypeError, GradScaler, clip_grad_norm_, optimizers

POISON = {"3.weight": INF}


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5", "GradScaler"])
@every_optimizer
def test_stepped_and_skipped(session, name, level):
    """Each outcome is what the weights say, and stays so when later steps have been taken."""
    loop = ScalerLoop(name) if level == "GradScaler" else Loop(session, name, level)
    none = loop.outcome()
    assert not none.stepped
    assert not none.skipped
    assert (none.reason, none.scale, none.scales, none.overflowed, none.culprits) == (None, None, {}, (), ())
    assert repr(pickle.loads(pickle.dumps(none))) == "StepOutcome(no step yet)"
    outcomes, moved = [], []
    for seed, poison in enumerate(({}, POISON, {}, {"0.bias": NAN}, {"1.weight": -INF}, {})):
        before = loop.values()
        outcomes.append(loop.iterate(seed, poison))
        moved.append(not torch.equal(before[0], loop.values()[0]))
        if poison and level != "GradScaler":
            assert_same(before, loop.values())
    assert moved == [True, False, True, False, False, True]
    assert [o.stepped for o in outcomes] == moved
    assert [o.skipped for o in outcomes] == [not m for m in moved]
    assert [o.reason for o in outcomes] == [None if m else "overflow" for m in moved]
    assert [o.scale for o in outcomes] == [65536.0, 65536.0, 32768.0, 32768.0, 16384.0, 8192.0]
    assert loop.outcome() is outcomes[-1]
    if level != "GradScaler":
        assert [o.overflowed for o in outcomes] == [() if m else (0,) for m in moved]
        assert outcomes[-1].scales == {0: 8192.0}


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_grad_scaler_and_groups_that_are_not_fused(kind):
    """As after the checkpoint of an optimizer that was not: they do not look at the flag."""
    loop = ScalerLoop("SGD-plain")
    loop.optimizer = kind(loop.model.parameters(), lr=0.1, fused=True)
    loop.optimizer.load_state_dict(kind(network().parameters(), lr=0.1).state_dict())
    before = loop.values()
    assert loop.iterate(0, POISON).skipped
    assert_same(before, loop.values())


@pytest.mark.parametrize("dampening", [0.0, 0.3])
def test_grad_scaler_and_torch_fused_sgd_at_its_first_step(dampening):
    """Its momentum buffers are as if the skipped step had not been."""

    def run(plan):
        loop = ScalerLoop("SGD-plain", init_scale=8.0, min_scale=8.0)
        loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.1, momentum=0.9, dampening=dampening, fused=True)
        for seed, poison in plan:
            loop.iterate(seed, poison)
        return loop.values()

    clean = [(seed, {}) for seed in range(3)]
    assert_same(run(clean), run([(7, POISON), *clean]))


def test_what_is_not_enabled_skips_nothing(session):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", enabled=False)
    scaler.scale(loss_of(model, 0)).backward()
    scaler.step(optimizer)
    assert scaler.outcome(optimizer).stepped
    session.initialize(model, optimizer, enabled=False)
    assert session.outcome(optimizer).stepped


@few_levels
@every_optimizer
def test_an_outcome_waits_for_the_device_when_it_is_read_or_not_at_all(session, name, level):
    """The host that has decided itself knows already."""
    loop = Loop(session, name, level)
    outcomes = []
    with HostReads() as reads:
        for seed, poison in enumerate(({}, POISON, {})):
            loop.backward(seed, poison)
            loop.optimizer.step()
            outcomes.append(session.outcome(loop.optimizer))
            loop.optimizer.zero_grad()
    assert reads.count == 0 or name in ON_HOST
    with HostReads() as reads:
        assert [o.stepped for o in outcomes] == [True, False, True]
        if name in ON_HOST:
            assert [(o.overflowed, len(o.culprits)) for o in outcomes] == [((), 0), ((0,), 1), ((), 0)]
    assert reads.count == 0 or name in ON_DEVICE


@few_levels
@pytest.mark.parametrize("name", ["FusedAdam", "AdamW-fused", "AdamW-foreach"])
def test_the_norm_that_was_taken(session, name, level):
    loop = Loop(session, name, level)
    loop.backward()
    norm = clip_grad_norm_(session.master_params(loop.optimizer), 0.01)
    loop.optimizer.step()
    outcome = session.outcome(loop.optimizer)
    loop.optimizer.zero_grad()
    assert outcome.grad_norm == norm.item() > 0.01
    if level != "O2" and level != "O5":
        assert loop.iterate().grad_norm is None


@with_plans
def test_the_norm_of_the_finite_check(session):
    """Where all gradients wait in 16 bits, it is known without clipping."""
    model = torch.nn.Linear(4, 2)
    optimizer = optimizers.FusedAdam(model.parameters())
    session.initialize(model, optimizer, opt_level="O5", loss_scale="dynamic", verbosity=0)
    backward(session, model(torch.ones(3, 4)).float().square().sum(), optimizer)
    optimizer.step()
    expected = session.outcome(optimizer).grad_norm
    backward(session, model(torch.ones(3, 4)).float().square().sum(), optimizer)
    norm = clip_grad_norm_(session.master_params(optimizer), 1e-3)
    _ = [p.grad for p in session.master_params(optimizer)]  # for a log: makes fp32 gradients of them
    optimizer.step()
    assert session.outcome(optimizer).grad_norm == norm.item()
    assert expected == pytest.approx(norm.item(), rel=0.1)


# --- several optimizers and losses ------------------------------------------------------------------------------------


@pytest.mark.parametrize("between", ["another block", "zeroed in place"])
@pytest.mark.parametrize("name", ["FusedSGD", "SGD-fused", "SGD-plain"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_norm_ends_with_the_gradients_that_it_was_taken_of(session, name, level, between):
    loop = Loop(session, name, level)
    loop.backward()
    clip_grad_norm_(session.master_params(loop.optimizer), 0.1)
    if between == "zeroed in place":
        loop.optimizer.zero_grad(set_to_none=False)
    loop.backward(1)
    loop.optimizer.step()
    assert session.outcome(loop.optimizer).grad_norm is None


def test_an_optimizer_that_amp_does_not_know(session):
    Loop(session)
    with pytest.raises(AmpError, match="amp.outcome: this SGD did not go through amp.initialize"):
        session.outcome(torch.optim.SGD([torch.ones(1)], lr=0.1))


@pytest.mark.parametrize("name", ["FusedAdam", "SGD-plain"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
def test_a_copy_of_an_outcome(session, name, copied):
    loop = Loop(session, name, "O2")
    for poison in ({}, POISON):
        loop.backward(0, poison)
        loop.optimizer.step()
        outcome = session.outcome(loop.optimizer)
        twin = copied(outcome)
        loop.optimizer.zero_grad()
        for attribute in ("stepped", "skipped", "reason", "overflowed", "scales", "scale", "grad_norm", "culprits"):
            assert getattr(twin, attribute) == getattr(outcome, attribute)
        assert repr(twin) == repr(outcome)
    assert repr(outcome).startswith("StepOutcome(skipped, reason='overflow', overflowed=(0,), scales={0: 65536.0}, cul")


def test_an_outcome_keeps_nothing_alive(session):
    loop = Loop(session, "FusedAdam", "O2")
    outcome = loop.iterate(0, POISON)
    watched = [weakref.ref(p) for g in loop.optimizer.param_groups for p in g["params"]]
    gc.disable()
    try:
        session.reset()
        del loop
        assert [reference() for reference in watched] == [None] * len(watched)
    finally:
        gc.enable()
    assert outcome.skipped


def test_replayed_operators(session):
    """The outcome of a captured step is that of the replay after which it is first read; an earlier one stays true."""
    loop = Loop(session, "FusedAdam", "O2")
    poison = torch.ones(())

    def iteration():
        backward(session, loss_of(loop.model, 0) * poison, loop.optimizer)
        loop.optimizer.step()
        loop.optimizer.zero_grad()

    for _ in range(2):
        iteration()
    before = session.outcome(loop.optimizer)
    with Tape() as tape:
        iteration()
    poison.fill_(INF)
    tape.replay()
    assert before.stepped
    assert session.outcome(loop.optimizer).skipped


# --- hooks ------------------------------------------------------------------------------------------------------------


@few_levels
@every_optimizer
def test_hooks_are_called_in_order(session, name, level):
    loop = Loop(session, name, level)
    calls = []
    session.on_step(lambda optimizer, outcome: calls.append(("step", optimizer, outcome)))
    handle = session.on_skip(lambda optimizer, outcome: calls.append(("skip", optimizer, outcome)))
    plan = [{}, POISON, POISON, {}]
    outcomes = [loop.iterate(seed, poison) for seed, poison in enumerate(plan)]
    assert [call[0] for call in calls] == ["skip" if poison else "step" for poison in plan]
    assert [call[1] is loop.optimizer for call in calls] == [True] * 4
    assert [call[2] for call in calls] == outcomes
    handle.remove()
    loop.iterate(0, POISON)
    assert len(calls) == 4
    session.reset()
    session.initialize(loop.model, loop.optimizer, opt_level=level, verbosity=0)
    loop.iterate()
    assert len(calls) == 4


@one_of_each
def test_a_hook_that_raises_finds_and_leaves_a_step_complete(session, sessions, name):
    loop, twin = Loop(session, name, "O2"), Loop(sessions(), name, "O2")

    def fails(optimizer, outcome):
        raise ZeroDivisionError

    for poison in (POISON, {}):
        handle = (session.on_skip if poison else session.on_step)(fails)
        with pytest.raises(ZeroDivisionError):
            loop.iterate(0, poison)
        handle.remove()
        loop.optimizer.zero_grad()
        twin.iterate(0, poison)
        assert_same(twin.values(), loop.values())
    loop.iterate(1)
    twin.iterate(1)
    assert_same(twin.values(), loop.values())


def test_a_hook_must_be_callable(session):
    with pytest.raises(AmpTypeError, match=r"a hook must be callable with \(optimizer, outcome\), got int"):
        session.on_step(3)
    with pytest.raises(AmpTypeError, match="a hook must be callable"):
        session.on_skip(None)
