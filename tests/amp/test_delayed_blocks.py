"""delay_unscale and delay_overflow_check."""

import copy

import pytest
import torch
from kit import INF, LEVELS, START, Probe, assert_same, backward, grads, probe, probes, scale_of, snapshot

from ampctx.scaling.guarded_step import overflowed


@pytest.mark.parametrize("level", LEVELS)
def test_delay_unscale_updates_the_scale_once(session, level):
    model, optimizer = probe(session, level, loss_scale="dynamic")
    for last in (False, False, True):
        backward(session, model.loss(1.0), optimizer, delay_unscale=not last)
    assert session.state_dict()["loss_scaler0"]["unskipped"] == 1
    assert all(torch.equal(g, torch.full_like(g, 3.0)) for g in grads(session, optimizer))


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("delay", ["delay_unscale", "delay_overflow_check"])
def test_a_delayed_overflow_is_not_lost(session, level, delay):
    model, optimizer = probe(session, level)
    before = snapshot(optimizer, model)
    backward(session, model.loss(INF), optimizer, **{delay: True})
    assert scale_of(session) == START
    backward(session, model.loss(1.0), optimizer)
    assert scale_of(session) == START / 2
    optimizer.step()
    assert_same(before, snapshot(optimizer, model))
    backward(session, model.loss(INF), optimizer, **{delay: True})
    optimizer.step()
    assert_same(before, snapshot(optimizer, model))
    assert session.skipped_steps(optimizer) == 2


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_a_closure_of_delayed_blocks(session, level):
    model, optimizer = probe(session, level, loss_scale=128.0)

    def closure():
        optimizer.zero_grad()
        backward(session, model.loss(1.0), optimizer, delay_unscale=True)
        return model.loss(1.0)

    optimizer.step(closure)
    assert model.weight.eq(1.875).all()


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_delayed_blocks_of_optimizers_that_share_parameters(session, level):
    model = Probe()
    both = [torch.optim.SGD(model.parameters(), lr=0.125) for _ in range(2)]
    session.initialize(model, both, opt_level=level, num_losses=2, loss_scale=8.0, verbosity=0)
    session.loss_scales[1].set(32.0)
    backward(session, model.loss(1.0), both, delay_unscale=True)
    backward(session, model.loss(1.0), both[0], delay_unscale=True)
    backward(session, model.loss(1.0), both, loss_id=1)
    assert model.weight.grad.eq(3).all()
    backward(session, model.loss(1.0), both, delay_unscale=True)
    for optimizer in both:
        optimizer.step()
    assert model.weight.grad.eq(4).all()
    assert model.weight.eq(1.0).all()


@pytest.mark.parametrize("level", LEVELS)
def test_a_block_of_another_scale_goes_on_with_delayed_gradients(session, level):
    model, optimizer = probe(session, level, loss_scale=8.0, n_losses=2)
    session.loss_scales[1].set(32.0)
    backward(session, model.loss(3.0), optimizer, delay_unscale=True)
    backward(session, model.loss(2.0), optimizer, loss_id=1)
    assert all(torch.equal(g, torch.full_like(g, 5.0)) for g in grads(session, optimizer))


@pytest.mark.parametrize("level", LEVELS)
def test_a_delayed_block_that_reaches_nothing_loses_nothing(session, level):
    model, optimizer = probe(session, level, loss_scale=8.0)
    backward(session, model.loss(3.0), optimizer)
    backward(session, torch.zeros((), requires_grad=True), optimizer, delay_unscale=True)
    backward(session, model.loss(2.0), optimizer)
    assert all(g.eq(5).all() for g in grads(session, optimizer))


@pytest.mark.parametrize("level", LEVELS)
def test_unfrozen_between_delayed_blocks(session, level):
    model = Probe()
    model.weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    session.initialize(model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
    backward(session, model.loss(1.0), optimizer, delay_unscale=True)
    model.weight.requires_grad_(True)
    backward(session, model.loss(1.0), optimizer)
    optimizer.step()
    assert model.weight.eq(1.875).all()
    assert model.norm.bias.eq(-0.25).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("plain", [True, False], ids=["plain-backward", "delayed-block"])
def test_reset_keeps_true_gradients(session, level, plain):
    model, optimizer = probe(session, level, loss_scale=128.0)
    if plain:
        model.loss(1.0).backward()
    else:
        backward(session, model.loss(1.0), optimizer, delay_unscale=True)
    session.reset()
    assert all(p.grad.eq(1).all() for p in model.parameters())
    assert all(p.grad.dtype == p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("loss_scale", [1.0, 128.0])
def test_an_optimizer_that_a_block_leaves_out_keeps_its_plain_gradients(session, level, loss_scale):
    models, optimizers = probes(session, level, loss_scale=loss_scale)
    models[1].weight.float().sum().backward()
    backward(session, models[0].loss(1.0) + models[1].weight.float().sum(), optimizers[0])
    optimizers[1].step()
    assert models[1].weight.eq(1.875).all()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_failure_while_a_step_unscales_a_delayed_block(session, level, monkeypatch):
    model, optimizer = probe(session, level, loss_scale=8.0)
    backward(session, model.loss(1.0), optimizer, delay_unscale=True)

    def fail(*args, **kwargs):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("ampctx.kernels.foreach.scale", fail)
        with pytest.raises(MemoryError):
            optimizer.step()
    optimizer.zero_grad()
    backward(session, model.loss(1.0), optimizer)
    optimizer.step()
    assert model.weight.eq(1.875).all()


# --- gradients that somebody else scaled, verdicts that somebody else takes -------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_declared_scaled(session, level):
    """A block adds to them; a step without one divides by what was said."""
    model, optimizer = probe(session, level, loss_scale="dynamic")
    (binding,) = session._bindings.values()
    scale = session.loss_scales[0]
    for by_block in (True, False):
        (model.loss(1.0) * START).backward()
        binding.gradients.declare_scaled(scale.inv_scale(torch.device("cpu")), (0, scale))
        if by_block:
            backward(session, model.loss(1.0), optimizer)
        before = [w.clone() for w in session.master_params(optimizer)]
        optimizer.step()
        expected = [w - 0.125 * (2.0 if by_block else 1.0) for w in before]
        assert_same([e.detach() for e in expected], [w.detach() for w in session.master_params(optimizer)])
        optimizer.zero_grad()


@pytest.mark.parametrize("level", LEVELS)
def test_a_window_dropped(session, level):
    """Gradients from before it are back, as if it had never begun."""
    model, optimizer = probe(session, level, loss_scale="dynamic")
    (binding,) = session._bindings.values()
    binding.gradients.drop_window()  # none is there
    backward(session, model.loss(3.0), optimizer)
    with torch.no_grad():
        binding.begin(1.0, 1.0)
        binding.gradients.delay(1.0, (0, session.loss_scales[0]))
    model.loss(float("inf")).backward()
    binding.gradients.drop_window()
    assert all(torch.equal(g, torch.full_like(g, 3.0)) for g in grads(session, optimizer))
    assert binding.gradients.window is None


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_verdict_taken(session, level):
    """The next step is taken whatever it was, and the scale is left to the taker."""
    model, optimizer = probe(session, level, n_losses=2)
    assert session._blocks.take_deferred(session.loss_scales[0]) is None
    backward(session, model.loss(INF), optimizer, delay_overflow_check=True)
    assert overflowed(session._bindings[optimizer].flags.by_loss)
    assert session._blocks.take_deferred(session.loss_scales[1]) is None
    assert overflowed(session._bindings[optimizer].flags.by_loss)
    assert session._blocks.take_deferred(session.loss_scales[0]).item() == 1.0
    assert not overflowed(session._bindings[optimizer].flags.by_loss)
    assert session._blocks.take_deferred(session.loss_scales[0]) is None
    optimizer.zero_grad()
    backward(session, model.loss(1.0), optimizer)
    assert scale_of(session) == START
    before = snapshot(optimizer, model)
    optimizer.step()
    assert session.skipped_steps(optimizer) == 0
    assert not torch.equal(before[0], snapshot(optimizer, model)[0])


class Recorder:
    def __init__(self):
        self.flags = []

    def checked(self, found_inf):
        self.flags.append(found_inf.item())


@pytest.mark.parametrize("loss_scale", ["dynamic", 128.0])
def test_the_observer_of_a_scale_hears_every_verdict(session, loss_scale):
    model, optimizer = probe(session, "O2", loss_scale=loss_scale)
    session.loss_scales[0].observer = recorder = Recorder()
    backward(session, model.loss(1.0), optimizer)
    backward(session, model.loss(INF), optimizer, delay_overflow_check=True)
    backward(session, model.loss(1.0), optimizer)
    backward(session, model.loss(INF), optimizer, delay_unscale=True)
    assert recorder.flags == [0.0, 1.0, 1.0 if loss_scale == "dynamic" else 0.0]
    optimizer.step()
    assert recorder.flags[3:] == ([1.0] if loss_scale == "dynamic" else [])
    assert copy.deepcopy(session.loss_scales[0]).observer is None
