"""A run whose gradients overflow for ever keeps its weights and a usable scale; if asked to, it ends with a reason."""

import pickle
import re

import pytest
import torch
from host_reads import HostReads
from kit import INF, NAN, OPTIMIZERS, assert_same, backward, loss_of
from stepping import ON_DEVICE, Loop, ScalerLoop, every_optimizer, few_levels, network, one_of_each

from ampctx import AmpError, AmpStallError, AmpTypeError, AmpValueError, GradScaler
from ampctx.scaling import step_record

POISON = {"0.weight": INF, "3.bias": NAN}
LOOPS = {"session": Loop, "GradScaler": lambda _, name, **options: ScalerLoop(name, **options)}
OVERFLOWS = 150  # from 2**16 the scale has reached the smallest number after 142
both = pytest.mark.parametrize("make", LOOPS.values(), ids=LOOPS)


@pytest.mark.full(but=9)
@pytest.mark.parametrize("floor", [None, 2.0**-4])
@pytest.mark.parametrize("level", ["O1", "O2", "GradScaler"])
@one_of_each
def test_overflows_leave_the_weights_and_a_usable_scale(session, name, level, floor):
    smallest = torch.finfo(torch.float32).tiny if floor is None else floor
    if level == "GradScaler":
        loop = ScalerLoop(name, min_scale=floor or 0.0)
    else:
        loop = Loop(session, name, level, min_loss_scale=floor)
    before = [p.detach().clone() for p in loop.model.parameters()]
    for i in range(OVERFLOWS):
        loop.iterate(0, {"0.weight": (INF, -INF, NAN)[i % 3]})
    assert_same(list(loop.model.parameters()), before)
    if level == "GradScaler":
        assert loop.scaler.get_scale() == smallest
        loop.iterate()  # torch's weights are NaN here
    else:
        assert session.loss_scales[0].value() == smallest
        assert session.skipped_steps(loop.optimizer) == OVERFLOWS
        session.loss_scales[0].set(1024.0)
        assert loop.iterate().stepped
    assert all(torch.isfinite(v).all() for v in loop.values())


def test_a_tensor_that_is_no_scale_is_not_taken():
    """``update(new_scale=tensor)`` does not look at the value on the host."""
    loop = ScalerLoop("SGD-plain")
    for bad in (0.0, -1.0, INF, NAN, 1e300, 1e-300):
        loop.scaler.scale(torch.ones(()))
        loop.scaler.update(torch.tensor(bad, dtype=torch.float64))
        assert loop.scaler.get_scale() == 65536.0
    loop.scaler.update(torch.tensor([8.0], dtype=torch.float16))
    assert loop.scaler.get_scale() == 8.0


# --- max_consecutive_skips --------------------------------------------------------------------------------------------


@both
@every_optimizer
def test_the_typed_error(session, make, name):
    """It comes with the first skip too many, on a device that the host does not run ahead of."""
    loop = make(session, name, max_consecutive_skips=4)
    before = [p.detach().clone() for p in loop.model.parameters()]
    for _ in range(4):
        loop.iterate(0, POISON)
    with pytest.raises(AmpStallError) as caught:
        loop.iterate(0, POISON)
    assert_same(before, list(loop.model.parameters()))
    assert isinstance(caught.value, (AmpError, RuntimeError))
    outcome = caught.value.outcome
    assert outcome.skipped
    names = ("0.weight", "3.bias") if make is Loop else ("param_groups[0][0]", "param_groups[0][5]")
    assert outcome.culprits == ((names[0], (8, 4), 1, 0), (names[1], (2,), 0, 1))
    text = str(caught.value)
    assert text.startswith(f"5 steps of {type(loop.optimizer).__name__} in a row were skipped (max_con")
    assert f"{names[0]} (1 inf of 32), {names[1]} (1 nan of 2)" in text
    assert "bfloat16" in text
    scales = [value for _, value in caught.value.scale_history]
    # The session halves at the end of a block, the GradScaler after the step.
    assert scales[-4:] == [2.0 ** (15 - i - (make is Loop)) for i in range(4)]
    assert re.search(r"scale after skips: .*\b4096\.0\b", text)
    twin = pickle.loads(pickle.dumps(caught.value))
    assert (str(twin), twin.outcome.culprits) == (text, outcome.culprits)
    assert twin.scale_history == caught.value.scale_history
    with pytest.raises(AmpStallError, match="6 steps"):
        loop.optimizer.zero_grad()
        if make is not Loop:
            loop.scaler.update()
        loop.iterate(0, POISON)
    loop.optimizer.zero_grad()
    assert loop.iterate().stepped  # without an update() in between


@both
@every_optimizer
def test_a_step_that_is_taken_starts_the_count_again(session, make, name):
    loop = make(session, name, max_consecutive_skips=2)
    for poison in (POISON, POISON, {}, POISON, {}, POISON, POISON):
        loop.iterate(0, poison)
    assert loop.iterate().stepped
    for _ in range(2):
        loop.iterate(0, POISON)
    with pytest.raises(AmpStallError, match="3 steps of"):
        loop.iterate(0, POISON)


@few_levels
@one_of_each
def test_going_on_after_the_error(session, sessions, name, level):
    """What was skipped with an error was skipped like any other step."""
    loop = Loop(session, name, level, max_consecutive_skips=1, min_loss_scale=8.0, max_loss_scale=8.0)
    twin = Loop(sessions(), name, level, min_loss_scale=8.0, max_loss_scale=8.0)
    loop.iterate(0)
    loop.iterate(9, POISON)
    with pytest.raises(AmpStallError):
        loop.iterate(9, POISON)
    assert session.outcome(loop.optimizer).skipped
    assert session.skipped_steps(loop.optimizer) == 2
    loop.optimizer.zero_grad()
    for seed in range(1, 3):
        loop.iterate(seed)
    for seed in range(3):
        twin.iterate(seed)
    assert_same(twin.values(), loop.values())


@both
@pytest.mark.parametrize("name", ON_DEVICE)
def test_no_host_read_before_the_limit_is_reached(session, make, name):
    loop = make(session, name, max_consecutive_skips=3)
    with HostReads() as reads:
        for poison in ({}, POISON, POISON, {}, POISON, POISON):
            loop.iterate(0, poison)
    assert reads.count == 0


@both
@pytest.mark.parametrize("name", ["FusedAdam", "AdamW-fused"])
def test_word_that_arrives_late(session, make, name, monkeypatch):
    """Where the host is ahead of the device, the error is late by as much, counts what was skipped meanwhile, and does
    not come when a step has been taken since."""
    arrived = []

    class Event:
        def query(self):
            return bool(arrived)

    monkeypatch.setattr(step_record, "arriving", lambda counts: (counts.clone(), Event()))
    loop = make(session, name, max_consecutive_skips=2)
    for _ in range(8):
        loop.iterate(0, POISON)
    arrived.append(1)
    assert loop.iterate().stepped  # word of it comes together with that of the skips
    arrived.clear()
    for _ in range(8):
        loop.iterate(0, POISON)
    arrived.append(1)
    loop.iterate(0, POISON)  # word of the first skip, and then of all nine
    with pytest.raises(AmpStallError, match="10 steps"):
        loop.iterate(0, POISON)


@one_of_each
def test_closures(session, name):
    loop = Loop(session, name, "O1", max_consecutive_skips=2)
    before = loop.values()[0]

    def closure():
        loop.optimizer.zero_grad()
        loop.backward(0, POISON)
        return torch.ones(())

    for _ in range(2):
        loop.optimizer.step(closure)
    with pytest.raises(AmpStallError, match=r"3 steps of .* 0.weight \(1 inf of 32\)"):
        loop.optimizer.step(closure)
    assert "found_inf" not in vars(loop.optimizer)
    assert torch.equal(before, loop.values()[0])


def test_optimizers_are_counted_each_by_itself(session):
    models = [network(0), network(1)]
    pair = [OPTIMIZERS["FusedAdam"](models[0].parameters()), OPTIMIZERS["SGD-plain"](models[1].parameters())]
    session.initialize(models, pair, opt_level="O2", num_losses=2, verbosity=0, max_consecutive_skips=3)
    with pytest.raises(AmpStallError, match="4 steps of SGD") as caught:
        for i in range(8):
            for loss_id, (model, optimizer) in enumerate(zip(models, pair, strict=True)):
                with session.scale_loss(loss_of(model, 0), optimizer, loss_id=loss_id) as scaled:
                    scaled.backward()
                    if loss_id or i % 2:
                        model[0].bias.grad[1] = INF
                optimizer.step()
                optimizer.zero_grad()
    assert [c.name for c in caught.value.outcome.culprits] == ["models[1].0.bias"]
    assert {loss_id for loss_id, _ in caught.value.scale_history} == {1}


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (0, AmpValueError, "max_consecutive_skips is 0, expected an int >= 1"),
        (-3, AmpValueError, "max_consecutive_skips is -3"),
        (2.5, AmpTypeError, "max_consecutive_skips must be an int, got float"),
        (True, AmpTypeError, "max_consecutive_skips must be an int, got bool"),
    ],
)
def test_bad_limits(session, value, error, text):
    model = network()
    optimizer = OPTIMIZERS["FusedAdam"](model.parameters())
    with pytest.raises(error, match=text):
        session.initialize(model, optimizer, opt_level="O2", verbosity=0, max_consecutive_skips=value)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert session.policy is None
    with pytest.raises(error, match=text):
        GradScaler("cpu", max_consecutive_skips=value)


def test_a_pickled_grad_scaler_keeps_the_limit():
    loop = ScalerLoop("SGD-plain", max_consecutive_skips=1)
    loop.iterate(0, POISON)
    loop.scaler = pickle.loads(pickle.dumps(loop.scaler))
    assert not loop.scaler.outcome(loop.optimizer).skipped
    loop.iterate(0, POISON)
    with pytest.raises(AmpStallError):
        loop.iterate(0, POISON)


# --- gradients that a skipped step leaves behind ----------------------------------------------------------------------


@pytest.mark.parametrize("clean_is_sparse", [False, True])
def test_what_is_left_of_a_sparse_gradient(session, clean_is_sparse):
    table = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    session.initialize(table, optimizer, verbosity=0)
    before = table.weight.detach().clone()
    for factor in (INF, 1.0):
        out = table(torch.tensor([1, 1])) if factor == INF or clean_is_sparse else table.weight
        backward(session, out.sum() * factor, optimizer)
        optimizer.step()
        assert session.outcome(optimizer).skipped
    assert torch.equal(table.weight, before)
