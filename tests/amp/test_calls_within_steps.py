"""What hooks and closures of a step call, blocks that outlive their session, and pickles of earlier versions."""

import pytest
import torch
from kit import backward, probe

from ampctx import AmpStallError, GradScaler

on_levels = pytest.mark.parametrize("level", ["O0", "O2"])


def iterate(session, model, optimizer):
    optimizer.zero_grad()
    backward(session, model.loss(1.0), optimizer)
    optimizer.step()


@pytest.mark.parametrize("register", ["register_step_pre_hook", "register_step_post_hook"])
@on_levels
def test_a_hook_of_a_step_saves(session, level, register):
    model, optimizer = probe(session, level, loss_scale=4.0)
    saved = []
    getattr(optimizer, register)(lambda *_: saved.append(session.state_dict(masters=True)))
    iterate(session, model, optimizer)
    assert len(saved) == 1
    iterate(session, model, optimizer)
    assert len(saved) == 2


@on_levels
def test_a_hook_of_a_step_resets(session, level):
    model, optimizer = probe(session, level, loss_scale=4.0)
    handle = optimizer.register_step_post_hook(lambda *_: session.reset())
    iterate(session, model, optimizer)
    handle.remove()
    assert model.weight.dtype == torch.float32
    before = model.weight.detach().clone()
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()  # the plain one
    assert torch.equal(model.weight, before - 0.125)


@on_levels
def test_a_block_that_a_generator_holds_open_ends_after_reset(session, level):
    model, optimizer = probe(session, level, loss_scale=4.0)

    def held():
        with session.scale_loss(model.loss(1.0), optimizer) as scaled:
            yield scaled

    generator = held()
    with pytest.raises(OSError, match="data"), session.scale_loss(model.loss(1.0), optimizer):
        next(generator)
        raise OSError("data")
    session.reset()
    generator.close()
    session.initialize(model, optimizer, opt_level=level, loss_scale=4.0, verbosity=0)
    iterate(session, model, optimizer)


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_goes_on_after_a_stall(fused):
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([p], lr=0.125, fused=fused)
    scaler = GradScaler("cpu", init_scale=4.0, max_consecutive_skips=1)
    with pytest.raises(AmpStallError):
        for _ in range(4):
            optimizer.zero_grad()
            scaler.scale((p * float("inf")).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    optimizer.zero_grad()
    scaler.scale(p.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(p, torch.full((3,), 0.875))
