"""``history()``: the latest steps as plain lists, read when asked for."""

import copy
import gc
import json
import math
import pickle

import pytest
import torch
from host_reads import HostReads
from kit import INF, LEVELS, OPTIMIZERS, batch, mlp, start
from torch import nn

from ampctx import AmpError, AmpTypeError, AmpValueError, GradScaler, amp, clip_grad_norm_

KINDS = {"on-device": "FusedSGD", "torch-fused": "AdamW-fused", "on-host": "SGD-foreach"}
every_optimizer = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


def iterate(session, model, optimizer, bad=False, loss_id=0, clip=True):
    """Returns the outcome of the step."""
    with session.scale_loss(model(batch()).float().square().mean(), optimizer, loss_id=loss_id) as scaled:
        scaled.backward()
        if bad:
            next(model.parameters()).grad.view(-1)[0] = INF
    if clip:
        clip_grad_norm_(session.master_params(optimizer), 1.0)
    optimizer.step()
    outcome = session.outcome(optimizer)
    optimizer.zero_grad()
    return outcome


def same(a, b):
    """Lists with nan in them."""
    return json.dumps(a) == json.dumps(b)


@every_optimizer
@pytest.mark.parametrize("level", LEVELS)
def test_it_tells_of_each_step_what_its_outcome_told(session, level, make):
    model, optimizer = start(session, level, make, loss_scale="dynamic")
    outcomes = [iterate(session, model, optimizer, bad) for bad in (False, True, False, False, True)]
    history = session.history(optimizer)
    assert history.step == [0, 1, 2, 3, 4]
    assert history.skipped == [False, True, False, False, True] == [o.skipped for o in outcomes]
    assert history.overflowed == {0: history.skipped}
    assert history.scale == {0: [65536.0, 65536.0, 32768.0, 32768.0, 32768.0]}
    assert same(history.grad_norm, [o.grad_norm for o in outcomes])
    assert [math.isfinite(norm) for norm in history.grad_norm] == [True, False, True, True, False]
    session.reset()
    model, optimizer = start(session, level, make, loss_scale=8.0)
    iterate(session, model, optimizer)
    history = session.history(optimizer)
    assert (history.scale, history.skipped) == ({0: [8.0]}, [False])


@every_optimizer
def test_it_takes_no_read_per_step_and_one_for_all(session, make):
    model, optimizer = start(session, "O2", make, loss_scale=1.0)  # which asks for no read either
    iterate(session, model, optimizer)
    steps = 72
    with HostReads() as reads:
        for _ in range(steps):
            iterate(session, model, optimizer)
    assert reads.count == 0
    assert session.history(optimizer).step == list(range(steps + 1))


def test_its_values_text_and_latest_few(session):
    model, optimizer = start(session, make="SGD-foreach")
    assert str(session.history()) == "no steps"
    for bad in (False, True):
        iterate(session, model, optimizer, bad)
    assert str(session.history()) == "steps 0 to 1, 1 skipped; latest gradient norm inf, loss scale 65536"
    for bad in (True, False):
        iterate(session, model, optimizer, bad)
    assert session.history(last=2).step == [2, 3]
    assert session.history(optimizer, 2).skipped == [True, False]
    assert session.history(last=0).step == []
    assert session.history(last=100).step == [0, 1, 2, 3]
    # Plain numbers of Python.
    history = session.history()
    assert json.loads(json.dumps(history._asdict()))["step"] == [0, 1, 2, 3]
    for values, kind in ((history.step, int), (history.skipped, bool), (history.grad_norm, float)):
        assert {type(v) for v in values} == {kind}
    assert {type(v) for v in history.scale[0]} == {float}
    assert {type(v) for v in history.overflowed[0]} == {bool}


@pytest.mark.parametrize("often", [False, True], ids=["read-at-the-end", "read-often"])
@pytest.mark.parametrize("length", [0, 1, 5, 200])
def test_it_keeps_the_latest_steps_alone(session, length, often):
    _, optimizer = start(session, "O0", history=length)
    n = 195
    for i in range(n):
        optimizer.step()
        if often and i % 50 == 0:
            session.history()
    history = session.history()
    kept = min(length, n)
    assert len(history.skipped) == len(history.scale[0]) == len(history.grad_norm) == kept
    assert history.step == list(range(n))[n - kept :]


def test_what_is_kept_is_bounded(session):
    """However many steps go by without anybody asking, for the memory of a device, too."""
    model, optimizer = start(session, "O1", KINDS["on-device"], history=64)

    def alive_after(steps):
        for _ in range(steps):
            iterate(session, model, optimizer)
        gc.collect()
        return sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects())

    assert alive_after(128) == alive_after(128)
    assert len(session.history().step) == 64


def test_several_losses(session):
    model, optimizer = start(session, num_losses=2)
    iterate(session, model, optimizer, loss_id=0)
    iterate(session, model, optimizer, bad=True, loss_id=1)
    iterate(session, model, optimizer, loss_id=1)
    history = session.history()
    nan = float("nan")
    assert same(history.scale, {0: [65536.0, nan, nan], 1: [nan, 65536.0, 32768.0]})
    assert history.overflowed == {0: [False] * 3, 1: [False, True, False]}
    assert history.skipped == [False, True, False]


def test_gradients_from_outside_of_blocks(session):
    model, optimizer = start(session, "O2")
    model(batch()).float().sum().backward()
    next(model.parameters()).grad.view(-1)[0] = INF
    optimizer.step()
    history = session.history()
    assert history.skipped == [True]
    assert history.overflowed == {-1: [True], 0: [False]}
    assert math.isnan(history.scale[0][0])


@pytest.mark.parametrize("name", ["on-device", "torch-fused"])
def test_a_flag_that_somebody_else_has_set(session, name):
    model, optimizer = start(session, "O1", KINDS[name])
    optimizer.found_inf = torch.tensor(1.0)
    outcome = iterate(session, model, optimizer, clip=False)
    del optimizer.found_inf
    assert outcome.reason == "found_inf"
    assert session.history().skipped == [True]
    assert math.isnan(session.history().grad_norm[0])  # nobody took it
    assert session.history().overflowed == {0: [False]}


def test_each_optimizer_has_its_own(session):
    models = [mlp(0), mlp(1)]
    both = [
        OPTIMIZERS[KINDS["on-device"]](models[0].parameters()),
        OPTIMIZERS[KINDS["on-host"]](models[1].parameters()),
    ]
    session.initialize(models, both, opt_level="O2", num_losses=2, verbosity=0)
    iterate(session, models[0], both[0])
    for bad in (True, False):
        iterate(session, models[1], both[1], bad=bad, loss_id=1)
    assert session.history(both[0]).skipped == [False]
    assert session.history(both[1]).skipped == [True, False]
    with pytest.raises(AmpError, match="amp.history: 2 optimizers are under amp. Pass one"):
        session.history()


def test_reset_ends_it_and_initialize_begins_anew(session):
    model, optimizer = start(session)
    iterate(session, model, optimizer)
    session.reset()
    assert session.history() == ([], [], [], {0: []}, {0: []})
    session.initialize(model, optimizer, opt_level="O1", verbosity=0)
    assert session.history().step == []
    iterate(session, model, optimizer)
    assert session.history().step == [0]


@pytest.mark.parametrize("options", [{"enabled": False}, {"optimizers": None, "num_losses": 2}], ids=str)
def test_where_there_are_no_steps_there_are_empty_lists(session, options):
    assert session.history().step == []
    model = mlp()
    options = {"optimizers": torch.optim.SGD(model.parameters(), lr=0.1), **options}
    session.initialize(model, verbosity=0, **options)
    assert session.history().scale == {i: [] for i in range(options.get("num_losses", 1))}
    assert session.history().skipped == []


def test_a_step_that_raised_is_none(session):
    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            raise KeyError("no")

    model, optimizer = start(session, "O1", lambda p: Failing(p, lr=0.1))
    with pytest.raises(KeyError, match="no"):
        iterate(session, model, optimizer)
    assert session.history().step == []


def test_wrong_arguments(session):
    assert amp.history() == session.history() == amp.History([], [], [], {0: []}, {0: []})
    model = mlp()
    with pytest.raises(AmpValueError, match="history is -1, expected an int >= 0"):
        session.initialize(model, verbosity=0, history=-1)
    with pytest.raises(AmpTypeError, match="history must be an int, got str"):
        session.initialize(model, verbosity=0, history="all")
    with pytest.raises(AmpValueError, match="history is -5"):
        GradScaler("cpu", history=-5)
    model, _ = start(session)
    with pytest.raises(AmpValueError, match="last is -1, expected an int >= 0"):
        session.history(last=-1)
    with pytest.raises(AmpTypeError, match="last must be an int, got float"):
        session.history(last=1.5)
    with pytest.raises(AmpError, match="amp.history: this SGD did not go through amp.initialize"):
        session.history(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1))


# --- GradScaler -------------------------------------------------------------------------------------------------------


def scaled_step(scaler, model, optimizer, bad=False, max_norm=1.0):
    scaler.scale(model(batch()).square().mean()).backward()
    if bad:
        next(model.parameters()).grad.view(-1)[0] = INF
    scaler.unscale_(optimizer)
    norm = clip_grad_norm_(model.parameters(), max_norm).item() if max_norm else math.nan
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=False)  # the next gradients are the same tensors
    return norm


@every_optimizer
def test_of_a_grad_scaler(make):
    model = mlp()
    optimizer, scaler = OPTIMIZERS[make](model.parameters()), GradScaler("cpu", init_scale=8.0)
    assert scaler.history() == ([], [], [], {0: []}, {0: []})
    norms = [scaled_step(scaler, model, optimizer, bad, None if i == 3 else 1.0) for i, bad in enumerate((1, 0, 1, 0))]
    history = scaler.history()
    assert history.skipped == history.overflowed[0] == [True, False, True, False]
    assert history.scale == {0: [8.0, 4.0, 4.0, 2.0]}
    assert same(history.grad_norm, norms)
    assert scaler.history(optimizer, last=1).step == [3]
    other = OPTIMIZERS[make](mlp(1).parameters())
    assert scaler.history(other).step == []
    scaler.scale(torch.ones((), requires_grad=True)).backward()
    scaler.step(other)
    scaler.update()
    assert scaler.history(other).skipped == [False]
    with pytest.raises(AmpError, match="GradScaler.history: 2 optimizers were stepped. Pass one of them"):
        scaler.history()


def test_of_a_grad_scaler_that_is_disabled_copied_or_bounded():
    model = mlp()
    optimizer = OPTIMIZERS[KINDS["on-host"]](model.parameters())
    disabled = GradScaler("cpu", enabled=False)
    optimizer.zero_grad()
    disabled.step(optimizer)
    assert disabled.history().step == []
    scaler = GradScaler("cpu", history=2)
    for _ in range(3):
        scaled_step(scaler, model, optimizer)
    assert scaler.history().step == [1, 2]
    for twin in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert twin.history().step == []
        for _ in range(3):
            scaled_step(twin, model, optimizer)
        assert twin.history().step == [1, 2]
    assert scaler.history().step == [1, 2]
