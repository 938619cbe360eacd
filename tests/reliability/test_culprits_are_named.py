"""On overflow, the parameters whose gradients were inf or nan are told by name, at no cost while nothing overflows."""

import logging

import pytest
import torch
from host_reads import OpCalls
from kit import INF, NAN, backward, loss_of, with_plans
from stepping import ON_HOST, Loop, ScalerLoop, every_optimizer, few_levels, network
from torch import nn

from ampctx import GradScaler
from ampctx.amp import Culprit

SHAPES = {name: p.shape for name, p in network().named_parameters()}
# In Linear and in BatchNorm: with a master and without at O2 and O5.
POISONS = {
    "one": {"3.weight": INF},
    "norm": {"1.bias": NAN},
    "both": {"0.weight": -INF, "1.weight": NAN},
    "all": dict.fromkeys(SHAPES, NAN),
}


def expected(poison):
    return {Culprit(k, SHAPES[k], int(v == v), int(v != v)) for k, v in poison.items()}


@pytest.mark.full(but=44)
@pytest.mark.parametrize("poison", POISONS.values(), ids=POISONS)
@few_levels
@every_optimizer
def test_in_a_hook(session, name, level, poison):
    """Names, shapes and counts, for every optimizer."""
    loop = Loop(session, name, level)
    found = []
    session.on_skip(lambda _, outcome: found.append(outcome.culprits))
    loop.iterate(0)
    loop.iterate(1, poison)
    loop.iterate(2)
    assert [set(culprits) for culprits in found] == [expected(poison)]


@pytest.mark.full(but=44)
@pytest.mark.parametrize("poison", POISONS.values(), ids=POISONS)
@pytest.mark.parametrize("level", ["O0", "O1"])
@every_optimizer
def test_after_the_step(session, name, level, poison):
    """Without masters everything is there until the gradients are zeroed."""
    loop = Loop(session, name, level)
    loop.backward(0, poison)
    loop.optimizer.step()
    outcome = session.outcome(loop.optimizer)
    assert set(outcome.culprits) == expected(poison)
    loop.optimizer.zero_grad()
    loop.iterate(1)
    assert (set(outcome.culprits), outcome.culprits_known) == (expected(poison), True)  # it was asked in time


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("name", ["FusedAdam", "FusedSGD", "FusedLAMB"])
@with_plans
def test_gradients_that_wait_in_16_bits(session, name, level):
    """Names stay known from the finite check; counts are those of gradients that are still there."""
    loop = Loop(session, name, level)
    loop.backward(0, POISONS["both"])
    loop.optimizer.step()
    first = session.outcome(loop.optimizer)
    assert set(first.culprits) == {("0.weight", (8, 4), None, None), ("1.weight", (8,), 0, 1)}
    loop.backward(0, POISONS["both"])
    loop.optimizer.step()
    later = session.outcome(loop.optimizer)
    loop.optimizer.zero_grad()
    for seed in range(3):
        loop.iterate(seed)
    assert later.culprits == (("0.weight", (8, 4), None, None),)


@pytest.mark.parametrize(
    "asked",
    [
        lambda loop: loop.optimizer.zero_grad(),
        lambda loop: loop.optimizer.zero_grad(set_to_none=False),
        lambda loop: loop.model.zero_grad(),
        lambda loop: loop.backward(1),
        lambda loop: loop.optimizer.step(),
    ],
    ids=["zero_grad", "zero_grad-in-place", "model.zero_grad", "block", "step"],
)
@pytest.mark.parametrize("name", ["FusedAdam", "AdamW-fused"])
def test_asked_too_late(session, name, asked):
    """They are not known any more; that the step was skipped stays known."""
    loop = Loop(session, name, "O1")
    loop.backward(0, POISONS["one"])
    loop.optimizer.step()
    outcome = session.outcome(loop.optimizer)
    asked(loop)
    assert (outcome.culprits, outcome.culprits_known) == ((), False)
    assert outcome.skipped
    assert "not known any more" in repr(outcome)


def test_masters_of_an_optimizer_of_torch_that_skips_on_the_device(session):
    """Their gradients are gone with the step: a hook has to ask."""
    loop = Loop(session, "AdamW-fused", "O2")
    loop.backward(0, POISONS["all"])
    loop.optimizer.step()
    assert session.outcome(loop.optimizer).culprits_known is False


@few_levels
@every_optimizer
@with_plans
def test_no_pass_and_no_read_while_nothing_overflows(session, name, level):
    """Hooks for skips or not, a clean iteration makes the same op calls."""
    loop = Loop(session, name, level)
    for i in range(2):  # the second step leaves lists with the library
        loop.iterate(i)
    with OpCalls() as calls:
        loop.iterate(2)
    handle = session.on_skip(lambda *_: None)
    with OpCalls() as with_hook:
        loop.iterate(3)
    handle.remove()
    assert with_hook.of == calls.of
    assert calls.of["multi_tensor_l2norm"] == 0
    masters = level in ("O2", "O5")
    # The finite check of gradients that wait in 16 bits, and the norms that LAMB, NovoGrad and LARC are about.
    own = {"FusedLAMB": 1, "FusedNovoGrad": 1 + masters, "LARC": 2}.get(name, 0)
    assert calls.of["multi_tensor_unscale_l2norm"] == (masters and name.startswith("Fused")) + own


@every_optimizer
def test_grad_scaler(name):
    loop = ScalerLoop(name)
    loop.backward(0, POISONS["both"])
    loop.scaler.step(loop.optimizer)
    outcome = loop.scaler.outcome(loop.optimizer)
    places = {"0.weight": "param_groups[0][0]", "1.weight": "param_groups[0][2]"}
    assert set(outcome.culprits) == {(places[n], *rest) for n, *rest in expected(POISONS["both"])}
    loop.scaler.update()
    loop.optimizer.zero_grad()
    loop.backward(1, POISONS["one"])
    loop.scaler.step(loop.optimizer)
    late = loop.scaler.outcome(loop.optimizer)
    loop.scaler.update()
    loop.optimizer.zero_grad()
    loop.iterate(2)
    if name in ON_HOST:
        assert late.culprits == (("param_groups[0][4]", (2, 8), 1, 0),)
    assert (late.culprits != (), late.culprits_known) == (name in ON_HOST,) * 2
    assert late.skipped


def test_names_that_the_optimizer_was_given():
    model = network()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    scaler = GradScaler("cpu")
    scaler.scale(loss_of(model, 0)).backward()
    model[3].bias.grad[1] = NAN
    scaler.step(optimizer)
    assert scaler.outcome(optimizer).culprits == (("3.bias", (2,), 0, 1),)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_names_of_several_models_and_of_none(session, level):
    models = [network(0), network(1)]
    extra = nn.Parameter(torch.ones(3))
    groups = [
        {"params": [*models[1].parameters(), *models[0].parameters()]},
        {"params": [nn.Parameter(torch.ones(1)), extra]},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    session.initialize(models, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    with session.scale_loss(sum(loss_of(m, 0) for m in models) + extra.sum(), optimizer) as scaled:
        scaled.backward()
        models[0][0].bias.grad[:2] = INF
        models[1][3].bias.grad[0] = NAN
        extra.grad[:] = torch.tensor([INF, NAN, 0.0])
    optimizer.step()
    assert set(session.outcome(optimizer).culprits) == {
        ("models[0].0.bias", (8,), 2, 0),
        ("models[1].3.bias", (2,), 0, 1),
        ("param_groups[1][1]", (3,), 1, 1),
    }


def test_sparse_and_wide_and_empty_gradients(session):
    """Large finite numbers whose norm overflows are no culprits, duplicates of a sparse gradient that add up to inf
    are."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(4, 2, sparse=True)
            self.empty = nn.Parameter(torch.ones(0))
            self.wide = nn.Parameter(torch.ones(2, dtype=torch.float64))
            self.large = nn.Parameter(torch.ones(2))

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.initialize(model, optimizer, opt_level="O1", min_loss_scale=1.0, verbosity=0)
    with session.scale_loss(torch.ones((), requires_grad=True), optimizer) as scaled:
        scaled.backward()
        rows = torch.full((2, 2), 3e38)
        model.table.weight.grad = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), rows, (4, 2), check_invariants=True)
        model.empty.grad = torch.ones(0)
        model.wide.grad = torch.tensor([1e300, INF], dtype=torch.float64)
        model.large.grad = torch.full((2,), 1e30)
    optimizer.step()
    assert set(session.outcome(optimizer).culprits) == {("table.weight", (4, 2), 2, 0), ("wide", (2,), 1, 0)}


def test_the_log_names_the_first(session, caplog):
    loop = Loop(session, "SGD-plain", "O2", verbosity=1)
    with caplog.at_level(logging.WARNING, "ampctx"):
        loop.iterate(0, POISONS["both"])
        for seed in range(8):
            loop.iterate(seed, POISONS["one"])
        for seed in range(7):
            loop.iterate(seed, POISONS["all"])
    assert [m for m in caplog.messages if m.startswith("ampctx: non-finite")] == [
        "ampctx: non-finite gradients: 0.weight (1 inf of 32), 1.weight (1 nan of 8)",
        "ampctx: non-finite gradients: 0.weight (1 nan of 32), 0.bias (1 nan of 8), 3.weight (1 nan of 16) and 3 more",
    ]


def test_a_model_that_is_gone(session):
    """The names go with it; the places in the optimizer are left."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.initialize(model, optimizer, opt_level="O0", loss_scale="dynamic", verbosity=0)
    weight = model[3].weight
    backward(session, loss_of(model, 0), optimizer)
    weight.grad[0, 0] = INF
    del model
    with session.scale_loss(weight.sum(), optimizer) as scaled:
        scaled.backward()
        weight.grad[0, 0] = INF
    optimizer.step()
    assert [c.name for c in session.outcome(optimizer).culprits] == ["param_groups[0][4]"]
