"""delay_unscale and delay_overflow_check."""

import contextlib

import pytest
import torch
from kit import LEVELS, Probe, backward, grads, probe, probes


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
def test_delayed_gradients_stay_scaled_in_the_model(session, level):
    """So that DistributedDataParallel reduces the sum with the last of them."""
    model, optimizer = probe(session, level, n_losses=2, loss_scale=8.0)
    session.loss_scales[1].set(32.0)
    backward(session, model.loss(1.0), optimizer)
    backward(session, model.loss(1.0), optimizer, delay_unscale=True)
    backward(session, model.loss(1.0), optimizer, delay_unscale=True)
    assert model.weight.grad.eq(16).all()
    torch.nn.init.constant_(model.weight, 0.5)
    assert next(session.master_params(optimizer)).eq(0.5).all()
    backward(session, model.loss(1.0), optimizer, loss_id=1)
    assert all(g.eq(4).all() for g in grads(session, optimizer))
    backward(session, model.loss(1.0), optimizer, delay_unscale=True)
    model.zero_grad()  # those from before the window, too
    backward(session, model.loss(1.0), optimizer)
    assert list(grads(session, optimizer))[-1].eq(1).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("options", [None, {}, {"delay_unscale": True}], ids=["plain-backward", "block", "delayed"])
def test_reset_keeps_true_gradients(session, level, options):
    model, optimizer = probe(session, level, loss_scale=128.0)
    if options is None:
        model.loss(1.0).backward()
    else:
        backward(session, model.loss(1.0), optimizer, **options)
    session.reset()
    assert all(p.grad.eq(1).all() for p in model.parameters())
    assert all(p.grad.dtype == p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize(("loss_scale", "raises"), [(1.0, False), (128.0, False), (128.0, True)])
def test_an_optimizer_that_a_block_leaves_out_keeps_its_plain_gradients(session, level, loss_scale, raises):
    """The scaled ones of the block do not reach it."""
    models, optimizers = probes(session, level, loss_scale=loss_scale)
    models[1].weight.float().sum().backward()
    with (
        pytest.raises(MemoryError) if raises else contextlib.nullcontext(),
        session.scale_loss(sum(m.loss(1.0) for m in models), optimizers[0]) as scaled,
    ):
        scaled.backward()
        if raises:
            raise MemoryError
    for optimizer in optimizers:
        optimizer.step()
    assert models[0].weight.eq(2.0 if raises else 1.875).all()
    assert models[1].weight.eq(1.875).all()
    assert models[1].norm.weight.eq(0.875 if loss_scale == 1.0 else 1.0).all()
