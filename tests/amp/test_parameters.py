"""Parameters that change, are shared, or get gradients outside of blocks."""

import pytest
import torch
from faults import Fault, fault_at_line, lines_of
from host_reads import HostReads
from kit import LEVELS, Probe, backward, grads, levels_by_default, loss_of, mlp, probe, probes

from ampctx import AmpError, amp, clip_grad_norm_


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_masters_follow_a_model_that_was_loaded_or_broadcast(session, level):
    model, optimizer = probe(session, level, loss_scale=8.0)
    master = next(iter(amp.master_params(optimizer)))
    with torch.no_grad():
        master.copy_(torch.tensor([2.0001, 2.0, 2.0]))
        model.weight.copy_(torch.tensor([2.0, 5.0, 2.0]))  # what a broadcast from another rank does
    backward(session, model.loss(0.0), optimizer)
    assert torch.equal(master, torch.tensor([2.0001, 5.0, 2.0]))
    optimizer.step()
    model.load_state_dict({k: v * 0 + 3.0 for k, v in model.state_dict().items()})
    backward(session, model.loss(8.0), optimizer)
    optimizer.step()
    assert torch.equal(model.weight.float(), torch.full((3,), 2.0))


@pytest.mark.parametrize("level", LEVELS)
def test_host_reads(session, level):
    """None in the block and in clipping; one in the step, where a dynamic scale has to decide about it."""
    model, optimizer = probe(session, level, loss_scale="dynamic")
    for _step in range(3):
        loss = model.loss(1.0)
        with HostReads() as reads:
            backward(session, loss, optimizer)
            clip_grad_norm_(amp.master_params(optimizer), 1.0)
        assert reads.count == 0
        with HostReads() as reads:
            optimizer.step()
        assert reads.count == 1
        optimizer.zero_grad()


@pytest.mark.parametrize("level", LEVELS)
def test_a_parameter_in_two_optimizers(session, level):
    model = Probe()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.125) for _ in range(2)]
    if level in ("O2", "O5"):
        with pytest.raises(AmpError, match="is in two optimizers.*use O1 or O4, or pass master_weights=False"):
            session.initialize(model, optimizers, opt_level=level, verbosity=0)
        assert model.weight.dtype == torch.float32
        assert list(amp.master_params(optimizers[0])) == list(model.parameters())
        return
    session.initialize(model, optimizers, opt_level=level, loss_scale=128.0, verbosity=0)
    for accumulated in (1.0, 2.0):
        backward(session, model.loss(1.0), optimizers)
        assert model.weight.grad.eq(accumulated).all()
    with pytest.raises(MemoryError), session.scale_loss(model.loss(1.0), optimizers) as scaled:
        scaled.backward()
        raise MemoryError
    assert model.weight.grad.eq(2).all()


@pytest.mark.parametrize(("level", "options"), [("O1", {}), ("O2", {"master_weights": False})])
def test_two_optimizers_that_take_turns_without_masters(session, level, options):
    """What the error of O2 advises: both step the same weights, as without amp."""
    model = Probe()
    optimizers = [torch.optim.SGD(model.parameters(), lr=lr) for lr in (0.125, 0.25)]
    session.initialize(model, optimizers, opt_level=level, loss_scale=128.0, verbosity=0, **options)
    weight = model.weight.detach().clone()
    for optimizer, lr in zip(optimizers, (0.125, 0.25), strict=True):
        optimizer.zero_grad()
        backward(session, model.loss(1.0), optimizer)
        optimizer.step()
        weight -= lr * model.weight.grad
        assert torch.equal(model.weight, weight)


@levels_by_default("O1", "O2")
def test_an_interrupt_in_a_block_of_two_optimizers(session, level):
    def run(interrupted):
        models, optimizers = probes(session, level, loss_scale=4.0)
        found = interrupted(lambda: backward(session, sum(m.loss(1.0) for m in models), optimizers))
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward(session, sum(m.loss(1.0) for m in models), optimizers)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.step()
            assert model.weight.eq(1.875).all()
        session.reset()
        return found

    def at(place):
        def interrupted(block):
            with pytest.raises(Fault), fault_at_line(place):
                block()

        return interrupted

    places = run(lines_of)
    assert len(places) > 50
    for place in places[::5]:
        run(at(place))


@pytest.mark.parametrize("level", LEVELS)
def test_zero_grad_clears_what_was_there_inside_the_block_or_in_a_window(session, level):
    model, optimizer = probe(session, level, loss_scale=8.0)
    for _ in range(3):
        with session.scale_loss(model.loss(1.0), optimizer) as scaled:
            optimizer.zero_grad()
            scaled.backward()
    assert all(g.eq(1).all() for g in grads(session, optimizer))
    for zeroes in (optimizer, model):
        backward(session, model.loss(1.0), optimizer, delay_unscale=True)
        zeroes.zero_grad()
        if zeroes is model:  # masters are the optimizer's
            optimizer.zero_grad()
        backward(session, model.loss(0.5), optimizer)
        assert all(g.eq(0.5).all() for g in grads(session, optimizer))


@pytest.mark.parametrize("level", LEVELS)
def test_state_from_before_initialize_follows_the_weights(session, level):
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)
    loss_of(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    session.initialize(model, optimizer, opt_level=level, loss_scale=1.0, verbosity=0)
    backward(session, loss_of(model), optimizer)
    optimizer.step()
    session.reset()
    loss_of(model).backward()
    optimizer.step()
    assert all(torch.isfinite(p).all() for p in model.parameters())
