"""Parameters that change, are shared, or get gradients outside of blocks."""

import pytest
import torch
from host_reads import HostReads
from kit import LEVELS, Probe, backward, grads, probe

from ampctx import AmpError, amp, clip_grad_norm_


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
