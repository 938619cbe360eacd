"""An exception anywhere leaves the next iteration as if the interrupted one had never begun."""

import contextlib
import signal
import sys
import time

import pytest
import stepping
import torch
from faults import Fault, fault_at_line, kernel_calls, lines_of, out_of_memory_at
from kit import assert_same, every_level, through_a_file
from kit import same as equal
from stepping import KINDS, ScalerLoop

every_kind = pytest.mark.parametrize("kind", KINDS)
every_optimizer = pytest.mark.parametrize("name", ["SGD-plain", "Adam-foreach", "Adam-fused", "FusedAdam"])


class Training(stepping.Training):
    def state(self):
        tensors = [*self.model.parameters()]
        for p in self.session.master_params(self.optimizer):
            tensors += [p, *(v for v in self.optimizer.state[p].values() if isinstance(v, torch.Tensor))]
        others = self.session.state_dict(), torch.is_autocast_enabled("cpu"), sorted(vars(self.optimizer))
        return [t.detach().clone() for t in tensors], others, self.session.skipped_steps(self.optimizer)


@pytest.fixture
def make_training():
    """Makes a ``Training`` and undoes it."""
    made = []

    def make(*args):
        made.append(Training(*args))
        return made[-1]

    yield make
    for training in made:
        training.session.reset()
    torch.autocast_increment_nesting()
    assert (torch.is_autocast_enabled("cpu"), torch.autocast_decrement_nesting()) == (False, 0)


def same(a, b):
    return equal(a[0], b[0]) and a[1:] == b[1:]


@contextlib.contextmanager
def step_raises(optimizer):
    """A hook of the user's raises, once."""
    handle = optimizer.register_step_pre_hook(_raise)
    with pytest.raises(KeyboardInterrupt):
        yield
    handle.remove()


def _raise(*args):
    raise KeyboardInterrupt


def finished(training):
    training.iterate(3)
    result = training.state()
    training.session.reset()
    return result


def interrupted(make, level, kind, fault):
    """The state after three iterations, of which ``fault(training, second)`` interrupts the second."""
    training = make(level, kind)
    training.iterate(1)
    training.optimizer.zero_grad()

    fault(training, lambda: training.block(2))
    return finished(training)


def references(make, level, kind):
    """Without the second iteration, and with its block but without its step."""
    never, whole = make(level, kind), make(level, kind)
    never.iterate(1)
    whole.iterate(1)
    whole.optimizer.zero_grad()
    whole.block(2)
    return finished(never), finished(whole)


# --- scale_loss -------------------------------------------------------------------------------------------------------


EACH = [("O1", "plain", 1), ("O2", "plain", 1), ("O2", "ampctx", 1)]


@pytest.mark.parametrize(
    ("level", "kind", "every"), [("O2", "ampctx", 5), *(pytest.param(*case, marks=pytest.mark.full) for case in EACH)]
)
def test_any_line_of_a_block_may_raise(make_training, level, kind, every):
    never, whole = references(Training, level, kind)
    places = []
    interrupted(make_training, level, kind, lambda _, second: places.extend(lines_of(second)))
    assert len(places) > 200

    for place in places[::every]:

        def fault(_, second, place=place):
            with pytest.raises(Fault), fault_at_line(place):
                second()

        result = interrupted(Training, level, kind, fault)
        assert same(result, never) or same(result, whole), place


def test_loading_ends_what_an_interrupted_block_has_left_incomplete(make_training):
    state = through_a_file(make_training("O1").session.state_dict(masters=True))
    counted = make_training("O1")
    for place in lines_of(lambda: counted.block(1))[::10]:
        training = make_training("O1")
        with pytest.raises(Fault), fault_at_line(place):
            training.block(1)
        training.session.load_state_dict(state)
        training.block(1)
        training.optimizer.step()
        assert training.session.outcome(training.optimizer).stepped
        training.session.reset()


@every_kind
@every_level
def test_any_kernel_may_run_out_of_memory(make_training, level, kind):
    never, whole = references(make_training, level, kind)
    calls = []

    def count(_, second):
        with kernel_calls(lambda number, name: calls.append(name)):
            second()

    interrupted(make_training, level, kind, count)
    assert calls
    for number in range(1, len(calls) + 1):

        def fault(_, second, number=number):
            with pytest.raises(torch.OutOfMemoryError), out_of_memory_at(number):
                second()

        result = interrupted(make_training, level, kind, fault)
        assert same(result, never) or same(result, whole), calls[number - 1]


ERRORS = [KeyboardInterrupt("^C"), torch.OutOfMemoryError("out of memory"), RuntimeError("CUDA error")]


@pytest.mark.full(but=36)
@pytest.mark.parametrize("delay", [False, True], ids=["alone", "after a delayed block"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
@every_kind
@every_level
def test_backward_may_raise_at_any_parameter(make_training, level, kind, error, delay):
    """A gradient hook of each parameter raises in its turn, when some gradients are there and others are not."""
    never, _ = references(make_training, level, kind)
    for i in range(6):

        def fault(training, second, i=i):
            def hook(grad):
                raise error

            if delay:
                training.block(5, delay_unscale=True)
            handle = list(training.model.parameters())[i].register_hook(hook)
            with pytest.raises(type(error)):
                second()
            handle.remove()

        assert same(interrupted(make_training, level, kind, fault), never)


@pytest.mark.parametrize("after", [0.002, 0.004, 0.008])
def test_an_interrupt_while_the_loss_is_multiplied(make_training, after):
    """Before the body has begun: the block is closed though somebody keeps the exception, as notebooks do."""

    def interrupt(*_):
        raise KeyboardInterrupt

    training = make_training("O0")
    loss = training.loss(1) * torch.ones(2**24)
    former = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt) as kept:
            signal.setitimer(signal.ITIMER_REAL, after)
            with training.session.scale_loss(loss, training.optimizer):
                time.sleep(1)
    finally:
        signal.signal(signal.SIGALRM, former)
    training.iterate(2)
    assert kept.value.__traceback__ is not None
    never = make_training("O0")
    never.iterate(2)
    assert same(training.state(), never.state())


@pytest.mark.parametrize("delay", [False, True], ids=["alone", "after a delayed block"])
@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
def test_generators_that_are_closed_in_any_order(make_training, level, delay):
    """Each holds a block open; the first to begin is the first to go."""
    training = make_training(level)
    if delay:
        training.block(1, delay_unscale=True)

    def in_a_block(seed):
        with training.session.scale_loss(training.loss(seed), training.optimizer) as scaled:
            scaled.backward()
            yield

    first, second = in_a_block(2), in_a_block(3)
    next(first), next(second)
    first.close(), second.close()
    if delay:
        training.optimizer.step()
    training.iterate(4)
    never = make_training(level)
    if delay:
        never.block(1, delay_unscale=True)
        never.optimizer.step()
    never.iterate(4)
    assert same(training.state(), never.state())


def without_casts(session):
    with session.disable_casts():
        assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(("work", "lines"), [(without_casts, 30), (lambda _: torch.ones(2).half().exp(), 8)])
@pytest.mark.parametrize("level", ["O1", "O4"])
def test_casts_come_back_wherever_an_interrupt_comes(make_training, level, work, lines):
    """At each line of entering and leaving, those of the standard library too; and of an op cast by a CPU kernel."""
    training, tracer = make_training(level), sys.gettrace()

    def is_interrupted(at):
        ran = 0

        def local(frame, event, argument):
            nonlocal ran
            ran += event == "line"
            if event == "line" and ran == at:
                raise KeyboardInterrupt
            return local

        sys.settrace(lambda *_: local)
        try:
            work(training.session)
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(tracer)
        return False

    at = 1
    while is_interrupted(at):
        assert torch.is_autocast_enabled("cpu"), at
        with training.session.disable_casts(), training.session.disable_casts():
            assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu"), at
        at += 1
    assert at > lines
    never, _ = references(make_training, level, "plain")
    training.iterate(1)
    assert same(finished(training), never)


# --- step -------------------------------------------------------------------------------------------------------------


class HalfSGD(torch.optim.SGD):
    """Steps its first parameter, and then runs out of memory if told so."""

    fails = False

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"])
                if self.fails:
                    raise torch.OutOfMemoryError("out of memory")


@every_level
def test_an_optimizer_that_fails_in_the_middle_leaves_model_and_masters_alike(make_training, level):
    training = make_training(level, lambda params: HalfSGD(params, lr=0.125))
    training.block(1)
    training.optimizer.fails = True
    with pytest.raises(torch.OutOfMemoryError):
        training.optimizer.step()
    training.optimizer.fails = False
    masters = training.session.master_params(training.optimizer)
    for p, master in zip(training.model.parameters(), masters, strict=True):
        assert torch.equal(p, master.to(p.dtype))
    training.optimizer.zero_grad()
    before = [p.detach().clone() for p in training.model.parameters()]
    training.iterate(2)
    assert not any(equal([p], [q]) for p, q in zip(training.model.parameters(), before, strict=True))
    assert training.session.skipped_steps(training.optimizer) == 0


# --- GradScaler -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale_"])
@every_optimizer
def test_grad_scaler_goes_on_after_a_step_that_raised(name, unscale):
    """The next iteration's gradients are unscaled, though the interrupted one's were already."""
    run, reference = ScalerLoop(name), ScalerLoop(name)
    for loop in (run, reference):
        loop.iterate(1)
    run.backward(2)
    if unscale:
        run.scaler.unscale_(run.optimizer)
    with step_raises(run.optimizer):
        run.scaler.step(run.optimizer)
    assert not {"grad_scale", "found_inf"} & vars(run.optimizer).keys()
    run.optimizer.zero_grad()
    for loop in (run, reference):
        loop.backward(3)
        if unscale:
            loop.scaler.unscale_(loop.optimizer)
        loop.step()
    assert_same(run.values(), reference.values())


@pytest.mark.parametrize("written_over", [False, True])
@every_optimizer
def test_grad_scaler_takes_the_same_gradients_again_and_tells_others_from_them(name, written_over):
    run, reference = ScalerLoop(name), ScalerLoop(name)
    run.backward(1)
    with step_raises(run.optimizer):
        run.scaler.step(run.optimizer)
    if written_over:
        run.optimizer.zero_grad(set_to_none=False)
        run.backward(2)
    run.step()
    reference.iterate(2 if written_over else 1)
    assert_same(run.values(), reference.values())


# --- what an interrupt must not leave behind --------------------------------------------------------------------------


def test_masters_whose_gradients_were_being_read_keep_none_for_later(make_training):
    def trained(read):
        training = make_training("O2", "ampctx")
        training.block(1)
        masters = list(training.session.master_params(training.optimizer))
        result = read(lambda: [p.grad for p in masters])
        training.optimizer.step()
        training.model.zero_grad()  # which does not reach masters
        training.block(2)
        training.optimizer.step()
        return training.state()[0], result

    expected, places = trained(lines_of)
    assert len(places) > 20
    for place in places[::2]:

        def interrupted(read, place=place):
            with pytest.raises(Fault), fault_at_line(place):
                read()

        torch.testing.assert_close(trained(interrupted)[0], expected, msg=str(place))


def test_no_flag_stays_on_an_optimizer_whose_step_was_interrupted(make_training):
    def overflowed():
        training = make_training("O1", lambda params: torch.optim.AdamW(params, fused=True))
        with training.session.scale_loss(training.loss(2) * float("inf"), training.optimizer) as scaled:
            scaled.backward()
        return training

    places = [place for place in lines_of(overflowed().optimizer.step) if place[0].endswith("amp/step.py")]
    assert len(places) > 20
    for place in places:
        training = overflowed()
        with contextlib.suppress(Fault), fault_at_line(place):
            training.optimizer.step()
        assert "found_inf" not in vars(training.optimizer), place
