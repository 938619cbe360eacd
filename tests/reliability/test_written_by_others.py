"""Masters and weights that other code than the step writes: schedules that swap weights, averages, edits, loads."""

import copy

import pytest
import torch
from kit import LOW, OPTIMIZERS, backward, loss_of, mlp, params_of, start, train

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


@by_level
@by_optimizer
@pytest.mark.parametrize("order", ["model first", "thaw first"])
def test_a_parameter_that_is_thawed_after_a_load_has_all_its_bits(session, level, name, order):
    """Three dicts, loaded in the order of the program."""

    def thaw(model, optimizer):
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": list(model[0].parameters())})

    def make():
        own = type(session)()
        model = mlp()
        model[0].requires_grad_(False)
        trained = torch.nn.ModuleList(model[1:])
        optimizer = OPTIMIZERS[name](trained.parameters())
        own.initialize(model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0)
        return own, model, optimizer

    source = make()
    train(*source, 2)
    thaw(*source[1:])
    train(*source, 3)
    saved = copy.deepcopy((source[1].state_dict(), source[2].state_dict(), source[0].state_dict()))
    train(*source, 2)
    run = make()
    if order == "thaw first":
        thaw(*run[1:])
    run[1].load_state_dict(saved[0])
    if order == "model first":
        thaw(*run[1:])
    run[2].load_state_dict(saved[1])
    run[0].load_state_dict(saved[2])
    train(*run, 2)
    assert all(map(torch.equal, params_of(source[2]), params_of(run[2])))
    for each, *_ in (source, run):
        each.reset()
