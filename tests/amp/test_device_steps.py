"""Optimizers that skip on the device: no host read from scale_loss to the scale update, and nothing lost by it."""

import functools
import logging

import pytest
import torch
from host_reads import HostReads
from kit import INF, NAN, ON_DEVICE, assert_same, backward, each_copy, loss_of, mlp, snapshot, start

from ampctx import clip_grad_norm_, optimizers

# torch 2.11 leaves the skip of its Adagrad to the host.
NAMES = [
    name for name, make in ON_DEVICE.items() if getattr(make([torch.ones(2, 2)]), "_step_supports_amp_scaling", False)
]
# torch's fused SGD makes its momentum at the first step, which here is one that it skips.
DAMPENED = functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9, dampening=0.3, fused=True)
FIRST_STEPS = {"SGD-dampened": DAMPENED, "SGD-dampened-in-LARC": lambda p: optimizers.LARC(DAMPENED(p))}
every_optimizer = pytest.mark.parametrize("name", NAMES)
every_level = pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])


dynamic = functools.partial(start, loss_scale="dynamic")


def iteration(session, model, optimizer, seed=0, bad=None, max_norm=None):
    """One whole iteration; ``bad`` goes into a gradient of the last layer."""
    with session.scale_loss(loss_of(model, seed), optimizer) as scaled:
        scaled.backward()
        if bad is not None:
            model[3].weight.grad.view(-1)[3] = bad
    if max_norm is not None:
        clip_grad_norm_(session.master_params(optimizer), max_norm)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.full(but=30)
@every_level
@every_optimizer
@pytest.mark.parametrize("max_norm", [None, 0.1], ids=["", "clip"])
def test_no_host_reads(session, name, level, max_norm):
    """The first iteration too, which makes state, masters and scales, and overflowed ones."""
    model, optimizer = dynamic(session, level, name, verbosity=1)
    with HostReads() as reads:
        for seed, bad in enumerate((None, INF, None, NAN)):
            iteration(session, model, optimizer, seed, bad, max_norm)
    assert reads.count == 0
    assert session.skipped_steps(optimizer) == 2


@every_level
@pytest.mark.parametrize("name", [*NAMES, *FIRST_STEPS])
def test_a_run_with_overflows_is_the_run_without_them(session, name, level):
    """An overflow at the first step, and in the middle: weights and state are those of the clean iterations alone."""

    def run(overflows):
        model, optimizer = dynamic(session, level, FIRST_STEPS.get(name, name), max_loss_scale=8.0, min_loss_scale=8.0)
        model.eval()  # BatchNorm's statistics would count the skipped forwards
        for seed in range(6):
            if seed in overflows:
                iteration(session, model, optimizer, 17, INF, max_norm=0.5)
            iteration(session, model, optimizer, seed, max_norm=0.5)
        skipped = session.skipped_steps(optimizer)
        result = snapshot(optimizer, model)
        session.reset()
        return result, skipped

    clean, none = run(())
    injected, skipped = run((0, 3))
    assert (none, skipped) == (0, 2)
    assert_same(clean, injected)


@every_level
def test_late_report(session, level, caplog):
    """A loss that overflowed is named, even where a later block of the step did not."""
    model, optimizer = dynamic(session, level, "FusedAdam", verbosity=1, num_losses=4)
    with caplog.at_level(logging.WARNING, "ampctx"):
        iteration(session, model, optimizer)
        assert caplog.messages == []
        for loss_id in range(4):
            with session.scale_loss(loss_of(model, loss_id), optimizer, loss_id=loss_id) as scaled:
                scaled.backward()
                if loss_id in (1, 2):
                    model[0].bias.grad[0] = INF
        optimizer.step()
        optimizer.zero_grad()
        iteration(session, model, optimizer)
    told = "Gradient overflow.  Skipping step, loss scaler {} reducing loss scale to 32768.0"
    assert caplog.messages[0] == told.format(1)
    assert [m for m in caplog.messages if "reducing" in m] == [told.format(1), told.format(2)]
    assert session.skipped_steps(optimizer) == 1


@pytest.mark.parametrize("zero", ["in the model", "after forward"])
@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("name", ["FusedAdam", "FusedLAMB", "Adam-fused"])
def test_blocks_in_a_closure_leave_the_weights_of_their_forward_alone(session, name, level, zero):
    """Whether nothing between the beginning of the step and the forward has written them or not."""
    models = []
    for with_closure in (True, False):
        model, optimizer = dynamic(session, level, name)

        def evaluate(model=model, optimizer=optimizer):
            if zero == "in the model":
                model.zero_grad()
            loss = loss_of(model)
            if zero == "after forward":
                optimizer.zero_grad()
            backward(session, loss, optimizer)
            return loss

        for _ in range(3):
            optimizer.step(evaluate) if with_closure else (evaluate(), optimizer.step())
        models.append(snapshot(optimizer, model))
        session.reset()
    assert_same(*models)


@every_level
@pytest.mark.parametrize("name", [name for name in NAMES if name != "LARC"])  # apex's LARC has no closure
def test_closure(session, name, level):
    """The closure runs with casts, its gradients are judged on the device, its loss is returned."""
    model, optimizer = dynamic(session, level, name)
    for seed, bad in enumerate((None, INF, None)):

        def closure(seed=seed, bad=bad):
            optimizer.zero_grad()
            loss = loss_of(model, seed)
            with session.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
                if bad:
                    model[3].weight.grad.view(-1)[3] = bad
            return loss

        with HostReads() as reads:
            loss = optimizer.step(closure)
        assert reads.count == 0
        assert loss.requires_grad
    assert session.skipped_steps(optimizer) == 1


@each_copy
def test_a_copied_optimizer_between_backward_and_step(session, copied):
    """Gradients that wait in 16 bits do not stand in the way of a copy, and are still there."""
    model, optimizer = dynamic(session, "O2", "FusedAdam")
    iteration(session, model, optimizer)
    backward(session, loss_of(model), optimizer)
    twin = copied(optimizer)
    for mine, theirs in zip(optimizer.param_groups[0]["params"], twin.param_groups[0]["params"], strict=True):
        assert torch.equal(mine, theirs)
        assert mine.grad is not None


class Wrapper:
    """A lookahead-like wrapper: what it does not know it asks of the optimizer inside."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.__dict__["inner"], name)

    def step(self):
        return self.inner.step()


class AsksForGradScaler(torch.optim.SGD):
    """torch's former protocol: the flag comes from the GradScaler that ``step`` is given."""

    _step_supports_amp_scaling = True

    def step(self, closure=None, *, grad_scaler=None):
        return super().step(closure)


def loaded(kind):
    """Fused until the checkpoint of one that was not."""

    def make(params):
        optimizer = kind(params, lr=0.01, fused=True)
        optimizer.load_state_dict(kind(mlp().parameters(), lr=0.01).state_dict())
        return optimizer

    return make


ODD = {
    "FusedAdam": lambda p: Wrapper(ON_DEVICE["FusedAdam"](p)),
    "Adam-fused": lambda p: Wrapper(ON_DEVICE["Adam-fused"](p)),
    "FusedAdam-in-LARC": lambda p: optimizers.LARC(Wrapper(ON_DEVICE["FusedAdam"](p))),
    "Adam-fused-in-LARC": lambda p: optimizers.LARC(Wrapper(ON_DEVICE["Adam-fused"](p))),
    "loaded-Adam": loaded(torch.optim.Adam),
    "loaded-SGD": loaded(torch.optim.SGD),
    "asking-SGD": lambda p: AsksForGradScaler(p, lr=0.01),
}


@pytest.mark.parametrize("name", ODD)
@every_level
def test_optimizers_that_only_seem_to_skip_on_the_device(session, name, level):
    """A wrapper does not pass for the optimizer inside, nor groups that are not fused for fused ones."""
    model, optimizer = dynamic(session, level, ODD[name])
    for bad, moves in ((None, True), (INF, False), (None, True)):
        before = [p.clone() for p in model.parameters()]
        iteration(session, model, optimizer, bad=bad)
        assert all(torch.isfinite(p).all() for p in model.parameters())
        moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
        assert any(moved) == moves
        # Biases before BatchNorm have gradients of 0, which Adam alone makes steps of.
        assert all(moved) == moves or "SGD" in name
    assert session.skipped_steps(optimizer) == 1


@pytest.mark.parametrize("flag", [torch.ones(1), torch.tensor([2]), 1.0, True], ids=["1-d", "int", "float", "bool"])
@pytest.mark.parametrize("bad", [None, INF], ids=["clean", "overflow"])
def test_flags_of_any_kind_beside_a_session(session, flag, bad):
    model, optimizer = dynamic(session, "O1", "FusedAdam")
    iteration(session, model, optimizer)
    before = [p.clone() for p in model.parameters()]
    optimizer.found_inf = flag
    iteration(session, model, optimizer, bad=bad)
    assert_same(before, list(model.parameters()))
    assert optimizer.found_inf is flag
    del optimizer.found_inf
    iteration(session, model, optimizer)
    assert not torch.equal(before[0], model[0].weight)
    assert session.skipped_steps(optimizer) == 1


def test_frozen_parameters_get_no_momentum(session):
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, dampening=0.1, fused=True)
    session.initialize(model, optimizer, opt_level="O1", verbosity=0)
    counts = []
    for seed in range(3):
        with HostReads() as reads:
            iteration(session, model, optimizer, seed)
        counts.append(reads.count)
    assert counts == [1, 0, 0]
    assert len([s for s in optimizer.state.values() if s]) == 4
