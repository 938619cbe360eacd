"""An interrupt at any line of a block or a step that has met an overflow: after zero_grad() the next clean iteration
steps, and the scale has fallen once at most. Whatever the line, each weight of the model is its rounded master."""

import copy
import functools

import pytest
import stepping
import torch
from faults import Fault, WritesFail, fault_at_line, lines_of
from kit import INF, params_of, same, scale_of
from stepping import ScalerLoop
from torch.amp.grad_scaler import OptState

from ampctx.kernels import grouping

INIT = 2.0**16


class Training(stepping.Training):
    def __init__(self, level, kind):
        super().__init__(level, kind, max_consecutive_skips=20)

    def masters(self):
        return [p.detach().clone() for p in self.session.master_params(self.optimizer)]

    def check_model(self):
        """Before anything of amp's is called that might write the weights."""
        for p, master in zip(self.model.parameters(), params_of(self.optimizer), strict=True):
            assert torch.equal(p, master.to(p.dtype))


def goes_on(training, place, first_may_skip):
    """A clean iteration after zero_grad() steps; the scale has fallen once at most. ``first_may_skip``: as it does for
    a block from before, where nothing of what was interrupted has happened."""
    training.check_model()
    training.optimizer.zero_grad()
    if first_may_skip:
        training.iterate()
    before = training.masters()
    training.iterate()
    assert scale_of(training.session) in (INIT, INIT / 2), place
    assert not training.session.outcome(training.optimizer).skipped, place
    after = training.masters()
    assert not any(map(torch.equal, before, after)), place
    assert all(t.isfinite().all() for t in after), place
    training.check_model()


def called(work, training):
    """As deep in the stack as ``lines_of`` calls it: amp looks through its callers."""
    work(training)


# What overflows, and what is interrupted: what runs before it, and it.
CASES = {
    "block": (lambda t: None, lambda t: t.block(factor=INF), False),
    "deferred": (lambda t: t.block(factor=INF, delay_overflow_check=True), lambda t: t.block(), True),
    "skipped": (lambda t: t.block(factor=INF), lambda t: t.optimizer.step(), True),
    # Ends at the step: no block without ``delay_unscale`` comes.
    "window": (lambda t: t.block(factor=INF, delay_unscale=True), lambda t: t.optimizer.step(), False),
    "taken": (lambda t: t.block(), lambda t: t.optimizer.step(), False),
}
EACH = [("O2", "ampctx", 1), ("O2", "plain", 1), ("O1", "plain", 3), ("O2", "torch-fused", 3)]


@pytest.mark.parametrize(
    ("level", "kind", "every"),
    # Most lines are those of the first two.
    [("O2", "ampctx", 40), *(pytest.param(*case, marks=pytest.mark.full) for case in EACH)],
)
@pytest.mark.parametrize("case", CASES)
def test_an_interrupt_at_any_line(level, kind, every, case):
    before, work, first_may_skip = CASES[case]
    for _ in range(2):  # the first time fills caches
        training = Training(level, kind)
        before(training)
        places = lines_of(functools.partial(work, training))
        training.session.reset()
    assert len(places) > 50
    for place in places[::every]:
        training = Training(level, kind)
        before(training)
        with pytest.raises(Fault), fault_at_line(place):
            called(work, training)
        goes_on(training, place, first_may_skip)
        training.session.reset()


@pytest.mark.parametrize(
    ("kind", "every"),
    [("ampctx", 12), *(pytest.param(kind, 2, marks=pytest.mark.full) for kind in ("plain", "ampctx"))],
)
def test_an_interrupted_step_with_a_closure_holds_no_later_one_up(kind, every):
    """Whether the closure has met an overflow that nobody has decided about yet, or the step just did."""

    def work(training):
        training.optimizer.step(lambda: (training.optimizer.zero_grad(), training.block(factor=INF)))

    training = Training("O2", kind)
    places = lines_of(lambda: work(training))
    training.session.reset()
    assert len(places) > 50
    for place in places[len(places) // 2 :: every]:
        training = Training("O2", kind)
        with pytest.raises(Fault), fault_at_line(place):
            work(training)
        goes_on(training, place, first_may_skip=False)
        training.session.reset()


# --- weights behind their masters -------------------------------------------------------------------------------------


def interrupted_copy(times=None):
    """A training whose step has written its masters, and none of the model's weights. ``times``: the writes that fail,
    by default all within the step, as if nobody had caught the exception."""
    training = Training("O2", "plain")
    training.block()
    before = training.masters()
    with pytest.raises(torch.OutOfMemoryError), WritesFail(training.model[0].parameters(), times) as writes:
        training.optimizer.step()
    assert writes.count
    masters = params_of(training.optimizer)
    assert not any(map(torch.equal, before, masters))
    return training, [master.detach().clone() for master in masters]


NEXT = {
    "nothing": lambda t: None,
    "iterate": lambda t: (t.optimizer.zero_grad(), t.block()),
    "state_dict": lambda t: t.model.state_dict(),
    "deepcopy": lambda t: copy.deepcopy(t.model),
    "block": lambda t: t.block(),
    "step": lambda t: t.optimizer.step(),
    "zero_grad": lambda t: t.optimizer.zero_grad(),
    "amp.state_dict": lambda t: t.session.state_dict(masters=True),
    "master_state_dict": lambda t: t.session.master_state_dict(t.model),
    "master_model": lambda t: t.session.master_model(t.model),
    "master_params": lambda t: list(t.session.master_params(t.optimizer)),
}


@pytest.mark.parametrize(
    ("times", "comes"),
    [*((1, name) for name in NEXT), *((None, name) for name in NEXT if name not in ("nothing", "deepcopy", "block"))],
)
def test_weights_are_written_though_the_copy_was_interrupted(times, comes):
    """At once where one write fails, else by what comes next."""
    training, masters = interrupted_copy(times)
    NEXT[comes](training)
    training.check_model()
    if comes != "step":
        assert same(params_of(training.optimizer), masters)
    training.session.reset()


def test_what_is_loaded_after_an_interrupted_copy_counts():
    """The rest of the weights are their rounded masters."""
    training, expected = interrupted_copy()
    loaded = {"weight": torch.full((8, 4), 3.1).half(), "bias": torch.full((8,), 0.7).half()}
    training.model[0].load_state_dict(loaded)
    expected[:2] = loaded["weight"].float(), loaded["bias"].float()
    assert same(training.masters(), expected)
    training.check_model()
    training.session.reset()


def test_an_optimizer_that_writes_the_model_may_be_interrupted_between_both(monkeypatch):
    """Without kernels: the master is written first, and then its weight."""
    monkeypatch.setattr(grouping, "_has_kernel", lambda *_: False)
    training = Training("O2", "ampctx")
    training.block()
    places = [p for p in lines_of(training.optimizer.step) if p[0] == "kernels/reference_steps.py"]
    training.session.reset()
    assert len(places) > 30
    for place in places[::3]:
        training = Training("O2", "ampctx")
        training.block()
        with pytest.raises(Fault), fault_at_line(place):
            training.optimizer.step()
        training.check_model()
        training.session.reset()


# --- GradScaler -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "every"), [("step", 4), ("update", 2), pytest.param("step", 1, marks=pytest.mark.full)]
)
def test_the_scale_of_a_grad_scaler_falls_once_for_an_overflow(place, every):
    def overflowed():
        """A loop, and the call to interrupt."""
        loop = ScalerLoop("SGD-plain")
        loop.backward(0, {"0.weight": INF})
        if place == "update":
            loop.scaler.step(loop.optimizer)
            return loop, loop.scaler.update
        return loop, lambda: loop.scaler.step(loop.optimizer)

    places = lines_of(overflowed()[1])
    assert len(places) > 15
    for at in places[::every]:
        loop, call = overflowed()
        with pytest.raises(Fault), fault_at_line(at):
            call()
        # As with torch's own, the next step is refused before.
        if any(state["stage"] is OptState.STEPPED for state in loop.scaler._per_optimizer_states.values()):
            loop.scaler.update()
        loop.optimizer.zero_grad()
        before = loop.values()
        assert loop.iterate().stepped, at
        assert loop.scaler.get_scale() in (INIT, INIT / 2), at
        assert not torch.equal(before[0], loop.values()[0]), at
