"""Masters and weights that other code than the step writes: schedules that swap weights, averages, edits, loads."""

import pytest
import torch
from kit import LOW, backward, loss_of, params_of, start, train

LEVELS_WITH_MASTERS = [level for level in LOW if level != "O3"]
by_level = pytest.mark.parametrize("level", LEVELS_WITH_MASTERS)
by_optimizer = pytest.mark.parametrize("name", ["SGD-plain", "FusedAdam"])


def weights_and_masters(session, model, optimizer):
    """(16-bit weight, master) of the linear layers."""
    pairs = zip(model.parameters(), params_of(optimizer), strict=True)
    return [(p, master) for p, master in pairs if p.dtype != torch.float32]


def assert_rounded(session, model, optimizer):
    for p, master in weights_and_masters(session, model, optimizer):
        assert torch.equal(p, master.to(p.dtype))


@torch.no_grad()
def scale_masters(optimizer, factor):
    for p in params_of(optimizer):
        p.mul_(factor)


@by_level
@by_optimizer
@pytest.mark.parametrize("then", ["forward", "state_dict", "block", "step", "master_params"])
def test_weights_follow_masters_that_were_written(session, level, name, then):
    """As ``optimizer.eval()`` of schedule-free optimizers does, or a swap of averaged weights."""
    model, optimizer = start(session, level, name, loss_scale=64.0)
    train(session, model, optimizer, 2)
    scale_masters(optimizer, 0.5)
    masters = [master.detach().clone() for master in params_of(optimizer)]
    if then == "forward":
        with torch.no_grad():
            model(torch.randn(4, 4))
    elif then == "state_dict":
        model.state_dict()
    elif then == "block":
        optimizer.zero_grad()
        backward(session, loss_of(model), optimizer)
    elif then == "step":
        optimizer.zero_grad()
        backward(session, loss_of(model), optimizer)
        optimizer.step()
    else:
        list(session.master_params(optimizer))
    if then != "step":
        assert all(map(torch.equal, params_of(optimizer), masters))
    assert_rounded(session, model, optimizer)


@by_level
@by_optimizer
def test_a_swap_and_a_swap_back_lose_nothing(session, level, name):
    model, optimizer = start(session, level, name, loss_scale=64.0)
    train(session, model, optimizer, 3)
    before = [master.detach().clone() for master in params_of(optimizer)]
    out = model(torch.ones(4, 4)).detach().clone()
    scale_masters(optimizer, 0.5)
    assert not torch.equal(model(torch.ones(4, 4)), out)
    with torch.no_grad():
        for master, value in zip(params_of(optimizer), before, strict=True):
            master.copy_(value)
    model(torch.ones(4, 4))
    assert all(map(torch.equal, params_of(optimizer), before))
    assert_rounded(session, model, optimizer)
