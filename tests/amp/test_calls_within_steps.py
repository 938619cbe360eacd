"""What hooks and closures of a step call, and blocks that outlive their session."""

import pytest
import torch
from kit import backward, probe

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
