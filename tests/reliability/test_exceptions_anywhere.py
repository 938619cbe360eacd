"""An exception anywhere leaves the next iteration as if the interrupted one had never begun."""

import signal
import sys
import time

import pytest
import torch
from faults import Fault, fault_at_line, kernel_calls, lines_of
from torch import nn

from ampctx import AmpError, optimizers
from ampctx.amp import AmpSession, GradScaler

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
OPTIMIZERS = {
    "plain": lambda params: torch.optim.SGD(params, lr=0.125, momentum=0.5),
    "foreach": lambda params: torch.optim.Adam(params, lr=0.125, eps=1e-3, foreach=True),
    "torch-fused": lambda params: torch.optim.Adam(params, lr=0.125, eps=1e-3, fused=True),
    "ampctx": lambda params: optimizers.FusedAdam(params, lr=0.125, eps=1e-3),
}


class Training:
    """A small model under a dynamic scale, at a level or (None) under a GradScaler."""

    def __init__(self, level, kind="plain"):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))
        self.optimizer = OPTIMIZERS[kind](self.model.parameters())
        self.session = AmpSession()
        options = {"opt_level": level, "loss_scale": "dynamic", "verbosity": 0}
        self.session.initialize(self.model, self.optimizer, **options)

    def loss(self, seed):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
        return self.model(x).float().square().mean()

    def block(self, seed, **kwargs):
        with self.session.scale_loss(self.loss(seed), self.optimizer, **kwargs) as scaled:
            scaled.backward()

    def iterate(self, seed):
        self.optimizer.zero_grad()
        self.block(seed)
        self.optimizer.step()

    def gradients(self):
        leaves = [*self.model.parameters(), *self.session.master_params(self.optimizer)]
        return [None if p.grad is None else p.grad.clone() for p in leaves]

    def state(self):
        tensors = [*self.model.parameters()]
        for p in self.session.master_params(self.optimizer):
            tensors += [p, *(v for v in self.optimizer.state[p].values() if isinstance(v, torch.Tensor))]
        others = self.session.state_dict(), torch.is_autocast_enabled("cpu"), sorted(vars(self.optimizer))
        return [t.detach().clone() for t in tensors], others, self.session.skipped_steps(self.optimizer)


@pytest.fixture
def train():
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


def equal(a, b):
    return len(a) == len(b) and all((x is None and y is None) or torch.equal(x, y) for x, y in zip(a, b, strict=True))


def same(a, b):
    return equal(a[0], b[0]) and a[1:] == b[1:]


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

    def second():
        training.block(2)

    fault(training, second)
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


@pytest.mark.parametrize(
    ("level", "kind"),
    [
        pytest.param("O1", "plain", marks=pytest.mark.full, id="O1"),
        pytest.param("O2", "plain", marks=pytest.mark.full, id="O2"),
        pytest.param("O2", "ampctx", id="O2-ampctx"),
    ],
)
def test_any_line_of_a_block_may_raise(train, level, kind):
    never, whole = references(Training, level, kind)
    places = []
    interrupted(train, level, kind, lambda _, second: places.extend(lines_of(second)))
    assert len(places) > 200

    for place in places:

        def fault(_, second, place=place):
            with pytest.raises(Fault), fault_at_line(place):
                second()

        result = interrupted(Training, level, kind, fault)
        assert same(result, never) or same(result, whole), place


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
def test_any_kernel_may_run_out_of_memory(train, level, kind):
    never, whole = references(train, level, kind)
    calls = []

    def count(_, second):
        with kernel_calls(lambda number, name: calls.append(name)):
            second()

    interrupted(train, level, kind, count)
    for number in range(1, len(calls) + 1):

        def fault(_, second, number=number):
            def on_call(now, name):
                if now == number:
                    raise torch.OutOfMemoryError(name)

            with pytest.raises(torch.OutOfMemoryError), kernel_calls(on_call):
                second()

        result = interrupted(train, level, kind, fault)
        assert same(result, never) or same(result, whole), calls[number - 1]


@pytest.mark.parametrize("delay", [False, True], ids=["blocks", "delayed"])
@pytest.mark.parametrize("kind", ["plain", "ampctx"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_what_was_accumulated_before_is_kept_or_refused(train, level, kind, delay):
    """The second of two blocks fails, gradients are not zeroed: they are those of the first, or the step says no."""
    outcomes = set()
    number = 0
    while True:
        number += 1
        training = train(level, kind)
        training.block(1, delay_unscale=delay)
        before = [None if p.grad is None else p.grad.clone() for p in training.model.parameters()]
        masters = None if delay else training.gradients()

        def on_call(now, name, number=number):
            if now == number:
                raise torch.OutOfMemoryError(name)

        try:
            with kernel_calls(on_call):
                training.block(2)
        except torch.OutOfMemoryError:
            after = [None if p.grad is None else p.grad.clone() for p in training.model.parameters()]
            if training.session._bindings[training.optimizer].gradients.incomplete:
                outcomes.add("refused")
                with pytest.raises(AmpError, match="Call optimizer.zero_grad\\(\\) and repeat"):
                    training.optimizer.step()
                training.iterate(3)
            else:
                outcomes.add("kept")
                assert equal(after, before)
                assert masters is None or equal(training.gradients(), masters)
                training.optimizer.step()
                training.session.reset()
        else:
            break
    assert "kept" in outcomes or not delay
    assert number > 1


class _Raises(torch.autograd.Function):
    """Raises in backward, in the thread that autograd runs it in."""

    @staticmethod
    def forward(ctx, x, error):
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ctx.error


ERRORS = [KeyboardInterrupt("^C"), torch.OutOfMemoryError("out of memory"), RuntimeError("CUDA error")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_body_may_raise_at_any_parameter(train, level, kind, error):
    """A gradient hook of each parameter raises in its turn, when some gradients are there and others are not."""
    never, _ = references(train, level, kind)
    for i in range(6):

        def fault(training, second, i=i):
            def hook(grad):
                raise error

            handle = list(training.model.parameters())[i].register_hook(hook)
            with pytest.raises(type(error)):
                second()
            handle.remove()

        assert same(interrupted(train, level, kind, fault), never)


@pytest.mark.parametrize("delay", [False, True], ids=["alone", "after a delayed block"])
@pytest.mark.parametrize("level", LEVELS)
def test_backward_may_raise(train, level, delay):
    never, _ = references(train, level, "plain")

    def fault(training, second):
        if delay:
            training.block(5, delay_unscale=True)
        loss = _Raises.apply(training.loss(2), KeyboardInterrupt("^C"))
        with pytest.raises(KeyboardInterrupt), training.session.scale_loss(loss, training.optimizer) as scaled:
            scaled.backward()

    assert same(interrupted(train, level, "plain", fault), never)


@pytest.mark.parametrize("after", [0.002, 0.004, 0.008])
def test_an_interrupt_while_the_loss_is_multiplied(train, after):
    """Before the body has begun: the block is closed though somebody keeps the exception, as notebooks do."""

    def interrupt(*_):
        raise KeyboardInterrupt

    training = train("O0")
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
    never = train("O0")
    never.iterate(2)
    assert same(training.state(), never.state())


@pytest.mark.parametrize("delay", [False, True], ids=["alone", "after a delayed block"])
@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
def test_generators_that_are_closed_in_any_order(train, level, delay):
    """Each holds a block open; the first to begin is the first to go."""
    training = train(level)
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
    never = train(level)
    if delay:
        never.block(1, delay_unscale=True)
        never.optimizer.step()
    never.iterate(4)
    assert same(training.state(), never.state())


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_casts_come_back_though_they_were_switched_off_half_way(train, level, monkeypatch):
    """An interrupt as soon as they are off."""
    training, switch = train(level), torch.set_autocast_enabled

    def interrupted(device_type, on):
        switch(device_type, on)
        if not on:
            raise KeyboardInterrupt

    monkeypatch.setattr(torch, "set_autocast_enabled", interrupted)
    with pytest.raises(KeyboardInterrupt), training.session.disable_casts():
        pytest.fail("entered")
    monkeypatch.undo()
    assert torch.is_autocast_enabled("cpu")
    assert training.model(torch.ones(2, 4)).dtype != torch.float32


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_casts_come_back_wherever_an_interrupt_comes(train, level):
    """At each line of entering and leaving, those of the standard library too."""
    training, tracer = train(level), sys.gettrace()

    def is_interrupted(at):
        lines = 0

        def local(frame, event, argument):
            nonlocal lines
            lines += event == "line"
            if event == "line" and lines == at:
                raise KeyboardInterrupt
            return local

        sys.settrace(lambda *_: local)
        try:
            with training.session.disable_casts():
                assert not torch.is_autocast_enabled("cpu")
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
    assert at > 30
    never, _ = references(train, level, "plain")
    training.iterate(1)
    assert same(finished(training), never)


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_disable_casts_may_be_left_by_any_exception(train, level):
    training = train(level)
    for error in ERRORS:
        with pytest.raises(type(error)), training.session.disable_casts(), training.session.disable_casts():
            assert training.loss(1).grad_fn is not None
            raise error
        assert torch.is_autocast_enabled("cpu")
    never, _ = references(train, level, "plain")
    training.iterate(1)
    assert same(finished(training), never)


# --- step -------------------------------------------------------------------------------------------------------------


def _raise(*args):
    raise KeyboardInterrupt


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
def test_a_hook_before_the_step_may_raise(train, level, kind):
    """The weights and the optimizer are as if the step had not been called."""

    def fault(training, second):
        second()
        handle = training.optimizer.register_step_pre_hook(_raise)
        with pytest.raises(KeyboardInterrupt):
            training.optimizer.step()
        handle.remove()

    _, whole = references(train, level, kind)
    assert same(interrupted(train, level, kind, fault), whole)


@pytest.mark.parametrize("kind", ["torch-fused", "ampctx"])
@pytest.mark.parametrize("level", LEVELS)
def test_the_verdict_on_a_step_that_raised(train, level, kind):
    """It counts where the step is tried again, and goes with its gradients where they are zeroed."""

    def overflowed():
        training = train(level, kind)
        training.iterate(1)
        training.optimizer.zero_grad()
        loss = training.loss(2) * float("inf")
        with training.session.scale_loss(loss, training.optimizer) as scaled:
            scaled.backward()
        handle = training.optimizer.register_step_pre_hook(_raise)
        with pytest.raises(KeyboardInterrupt):
            training.optimizer.step()
        handle.remove()
        return training

    again = overflowed()
    before = again.state()[0]
    again.optimizer.step()
    assert equal(again.state()[0], before)
    assert again.session.skipped_steps(again.optimizer) == 1
    again.session.reset()

    training = overflowed()
    before = training.model[0].weight.detach().clone()
    training.iterate(3)
    assert not torch.equal(training.model[0].weight, before)
    assert training.session.skipped_steps(training.optimizer) == 0


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
def test_a_hook_after_the_step_may_raise(train, level, kind):
    """The step counts: the model has the new weights."""
    training, reference = train(level, kind), train(level, kind)

    training.block(1)
    handle = training.optimizer.register_step_post_hook(_raise)
    with pytest.raises(KeyboardInterrupt):
        training.optimizer.step()
    handle.remove()
    reference.iterate(1)
    assert same(finished(training), finished(reference))


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


@pytest.mark.parametrize("level", LEVELS)
def test_an_optimizer_that_fails_in_the_middle_leaves_model_and_masters_alike(train, level, monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "half", lambda params: HalfSGD(params, lr=0.125))
    training = train(level, "half")
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


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_a_closure_that_raises_after_the_optimizer_has_moved(train, level, monkeypatch):
    """L-BFGS evaluates more than once: parameters and state go back to where the step began."""
    monkeypatch.setitem(OPTIMIZERS, "lbfgs", lambda params: torch.optim.LBFGS(params, lr=0.125, max_iter=3))
    training = train(level, "lbfgs")
    before, evaluations = training.state(), []

    def closure():
        evaluations.append(1)
        if len(evaluations) == 3:
            raise KeyboardInterrupt
        training.optimizer.zero_grad()
        loss = training.loss(1)
        with training.session.scale_loss(loss, training.optimizer) as scaled:
            scaled.backward()
        return loss

    with pytest.raises(KeyboardInterrupt):
        training.optimizer.step(closure)
    assert len(evaluations) == 3
    assert equal(training.state()[0], before[0])


# --- GradScaler -------------------------------------------------------------------------------------------------------


class Scaled:
    def __init__(self, kind):
        torch.manual_seed(0)
        self.model = nn.Linear(4, 2)
        self.optimizer = OPTIMIZERS[kind](self.model.parameters())
        self.scaler = GradScaler("cpu", growth_interval=100)

    def backward(self, seed, zero=True):
        if zero:
            self.optimizer.zero_grad()
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
        self.scaler.scale(self.model(x).square().mean()).backward()

    def iterate(self, seed, unscale=False):
        self.backward(seed)
        if unscale:
            self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def weights(self):
        return [p.detach().clone() for p in self.model.parameters()]


@pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale_"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_grad_scaler_goes_on_after_a_step_that_raised(kind, unscale):
    """The next iteration's gradients are unscaled, though the interrupted one's were already."""
    run, reference = Scaled(kind), Scaled(kind)
    run.iterate(1)
    reference.iterate(1)

    run.backward(2)
    if unscale:
        run.scaler.unscale_(run.optimizer)
    handle = run.optimizer.register_step_pre_hook(_raise)
    with pytest.raises(KeyboardInterrupt):
        run.scaler.step(run.optimizer)
    handle.remove()
    assert not {"grad_scale", "found_inf"} & vars(run.optimizer).keys()
    run.iterate(3, unscale)
    reference.iterate(3, unscale)
    assert equal(run.weights(), reference.weights())


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_grad_scaler_takes_the_same_gradients_again(kind):
    run, reference = Scaled(kind), Scaled(kind)

    run.backward(1)
    handle = run.optimizer.register_step_pre_hook(_raise)
    with pytest.raises(KeyboardInterrupt):
        run.scaler.step(run.optimizer)
    handle.remove()
    run.scaler.step(run.optimizer)
    run.scaler.update()
    reference.iterate(1)
    assert equal(run.weights(), reference.weights())


def test_grad_scaler_tells_gradients_that_were_written_over_from_the_same_ones():
    run, reference = Scaled("plain"), Scaled("plain")

    run.backward(1)
    handle = run.optimizer.register_step_pre_hook(_raise)
    with pytest.raises(KeyboardInterrupt):
        run.scaler.step(run.optimizer)
    handle.remove()
    run.optimizer.zero_grad(set_to_none=False)
    run.backward(2, zero=False)
    run.scaler.step(run.optimizer)
    reference.iterate(2)
    assert equal(run.weights(), reference.weights())
