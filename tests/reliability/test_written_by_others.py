"""Masters and weights that other code than the step writes: schedules that swap weights, averages, edits, loads."""

import pytest
import torch
from kit import LOW, backward, loss_of, params_of, start, train

LEVELS_WITH_MASTERS = [level for level in LOW if level != "O3"]
by_level = pytest.mark.parametrize("level", LEVELS_WITH_MASTERS)
by_optimizer = pytest.mark.parametrize("name", ["SGD-plain", "FusedAdam"])


def assert_rounded(model, optimizer):
    for p, master in zip(model.parameters(), params_of(optimizer), strict=True):
        assert torch.equal(p, master.to(p.dtype))


@torch.no_grad()
def scale_masters(optimizer, factor):
    for p in params_of(optimizer):
        p.mul_(factor)


THEN = {
    "forward": lambda s, m, o: m(torch.randn(4, 4)),
    "state_dict": lambda s, m, o: m.state_dict(),
    "block": lambda s, m, o: backward(s, loss_of(m), o),
    "step": lambda s, m, o: (backward(s, loss_of(m), o), o.step()),
    "master_params": lambda s, m, o: list(s.master_params(o)),
}


@by_level
@by_optimizer
@pytest.mark.parametrize("then", THEN)
def test_weights_follow_masters_that_were_written(session, level, name, then):
    """As ``optimizer.eval()`` of schedule-free optimizers does, or a swap of averaged weights."""
    model, optimizer = start(session, level, name, loss_scale=64.0)
    train(session, model, optimizer, 2)
    scale_masters(optimizer, 0.5)
    masters = [master.detach().clone() for master in params_of(optimizer)]
    THEN[then](session, model, optimizer)
    if then != "step":
        assert all(map(torch.equal, params_of(optimizer), masters))
    assert_rounded(model, optimizer)


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
    assert_rounded(model, optimizer)
