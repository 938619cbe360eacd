"""The ways in which programs call scale_loss and what is in it, and the sequences that skip a step.

All numbers are sums of few powers of two, so that no level may change a bit of what fp64 gives without amp.
"""

import warnings
from functools import partial

import pytest
import torch
from apex import amp
from apex.amp import _amp_state
from apex.optimizers import FusedSGD
from kit import every_level
from torch import nn

dynamic_levels = pytest.mark.parametrize("level", ["O1", "O2"])
# apex leaves the gradients of masters None without materialize_master_grads. Here they are there, and true, either way.
MAKE = {
    "SGD": torch.optim.SGD,
    "FusedSGD": FusedSGD,
    "FusedSGD-not-materialized": partial(FusedSGD, materialize_master_grads=False),
}
each_make = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)


class Mixed(nn.Module):
    """A ``wide`` fp32 and a ``narrow`` 16-bit parameter, whose gradients depend on each other's value."""

    def __init__(self, level):
        super().__init__()
        self.wide = nn.Parameter(torch.tensor([1.0, -0.5, 2.0]))
        low = torch.bfloat16 if level in ("O4", "O5") else torch.float16
        self.narrow = nn.Parameter(torch.tensor([1.0, 0.5, 2.0], dtype=low))

    def forward(self, x):
        return (x * self.wide * self.narrow).sum()


def initialize(model, optimizer, level, scale=(16.0,)):
    """As apex's tests call it, of a model that is mixed already: nothing is cast. A scale for each loss."""
    _amp_state.allow_incoming_model_not_fp32 = True
    try:
        options = {"cast_model_type": False, "num_losses": len(scale), "verbosity": 0}
        amp.initialize(model, optimizer, opt_level=level, **options)
    finally:
        _amp_state.allow_incoming_model_not_fp32 = False
    for scaler, value in zip(_amp_state.loss_scalers, scale, strict=True):
        scaler._loss_scale = value


def initialized(level, make=torch.optim.SGD, scale=(16.0,)):
    """A model whose gradients are small multiples of powers of two, and its optimizer."""
    model = Mixed(level)
    optimizer = make(model.parameters(), lr=0.5)
    initialize(model, optimizer, level, scale)
    return model, optimizer


def scales():
    return [scaler.loss_scale() for scaler in _amp_state.loss_scalers]


def assert_exact(actual, expected):
    """Equal to an fp64 value that the type of ``actual`` holds."""
    assert torch.equal(expected.to(actual.dtype).double(), expected), "the reference does not fit the type"
    assert torch.equal(actual.detach().double(), expected), (actual, expected)


def loss_of(model, factor=1.0):
    return model(torch.full((3,), factor))


def grads_of(model):
    """d loss / d wide and d loss / d narrow for a factor of 1."""
    return [model.narrow.detach().double().clone(), model.wide.detach().double().clone()]


def backward(model, optimizer, factor=1.0, **kwargs):
    with amp.scale_loss(loss_of(model, factor), optimizer, **kwargs) as scaled:
        scaled.backward()


def overflow(model, optimizer, **kwargs):
    with amp.scale_loss(loss_of(model), optimizer, **kwargs) as scaled:
        scaled.backward()
        model.wide.grad[0] = float("inf")


def check_grads(optimizer, expected, factor):
    for p, grad in zip(amp.master_params(optimizer), expected, strict=True):
        assert_exact(p.grad, grad * factor)


def values(optimizer):
    return [p.detach().clone() for p in amp.master_params(optimizer)]


def assert_stepped(optimizer, before, grads, factor):
    for p, old, grad in zip(amp.master_params(optimizer), before, grads, strict=True):
        assert_exact(p, old.double() - 0.5 * factor * grad)


def assert_skipped(optimizer, before):
    assert all(torch.equal(p, old) for p, old in zip(amp.master_params(optimizer), before, strict=True))


# --- calls ------------------------------------------------------------------------------------------------------------


@every_level
def test_create_graph(level):
    model, optimizer = initialized(level)
    expected = grads_of(model)
    with amp.scale_loss(loss_of(model), optimizer) as scaled, warnings.catch_warnings():
        # torch says, once in a process, that this makes a cycle of references.
        warnings.filterwarnings("ignore", message=".*create_graph=True")
        scaled.backward(create_graph=True)
    check_grads(optimizer, expected, 1)
    # The gradients lead back to the weights: let go of that.
    for p in [*model.parameters(), *amp.master_params(optimizer)]:
        p.grad = None


@every_level
def test_autograd_grad_with_unscaling_by_hand(level):
    """A penalty on the norm of gradients, as GANs have it: d/dw and d/dn of (|n|^2 + |w|^2) / 4 beside the loss's."""
    model, optimizer = initialized(level)
    wide, narrow = model.wide.detach().double(), model.narrow.detach().double()
    with amp.scale_loss(loss_of(model), optimizer) as scaled:
        grads = torch.autograd.grad(scaled, list(model.parameters()), create_graph=True)
    for grad, expected in zip(grads, grads_of(model), strict=True):
        assert_exact(grad, expected * scales()[0])
    assert [p.grad for p in amp.master_params(optimizer)] == [None, None]
    penalty = sum((g.float() / scales()[0]).square().sum() for g in grads) / 4
    with amp.scale_loss(loss_of(model) + penalty, optimizer) as scaled:
        scaled.backward()
    for p, expected in zip(amp.master_params(optimizer), (narrow + wide / 2, wide + narrow / 2), strict=True):
        assert_exact(p.grad, expected)


@every_level
def test_losses_with_elements(level):
    model, optimizer = initialized(level)
    expected = grads_of(model)
    weights = torch.tensor([1.0, 0.0, -2.0])
    with amp.scale_loss(model.wide * model.narrow, optimizer) as scaled:
        assert scaled.shape == (3,)
        scaled.backward(weights)
    check_grads(optimizer, expected, weights.double())


@every_level
@pytest.mark.parametrize("wrap", [lambda o: o, lambda o: [o], lambda o: (o,)], ids=["alone", "list", "tuple"])
@pytest.mark.parametrize("loss_id", [0, 1, -1, -2])
def test_arguments_of_scale_loss(level, wrap, loss_id):
    model, optimizer = initialized(level, scale=(16.0, 4.0))
    expected = grads_of(model)
    with amp.scale_loss(loss_of(model), wrap(optimizer), loss_id, model) as scaled:
        assert scaled.item() == 4.75 * (16.0, 4.0)[loss_id]
        scaled.backward()
    check_grads(optimizer, expected, 1)


@pytest.mark.parametrize("level", ["O0", "O3", "O4"])
def test_any_optimizer_passes_where_nothing_is_scaled(level):
    """A static scale of 1.0 without master weights."""
    model = nn.Linear(2, 1)
    amp.initialize(model, [], opt_level=level, verbosity=0)
    stranger = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    for optimizers in (stranger, [stranger], None, []):
        loss = model(torch.ones(3, 2)).float().sum()
        with amp.scale_loss(loss, optimizers) as scaled:
            assert torch.equal(scaled, loss)


# --- skips ------------------------------------------------------------------------------------------------------------

CLEAN_LATER = {
    "clean-backward": lambda model, optimizer: backward(model, optimizer),
    "clean-backward-of-another-loss": lambda model, optimizer: backward(model, optimizer, loss_id=1),
    "zero-grad": lambda model, optimizer: optimizer.zero_grad(),
    "second-overflow": lambda model, optimizer: overflow(model, optimizer),
    "overflow-of-another-loss": lambda model, optimizer: overflow(model, optimizer, loss_id=1),
    "delayed-block": lambda model, optimizer: backward(model, optimizer, delay_unscale=True),
}


@dynamic_levels
@each_make
@pytest.mark.parametrize("then", CLEAN_LATER)
def test_one_step_is_skipped_whatever_comes_before_it(level, make, then):
    model, optimizer = initialized(level, make, scale=(16.0, 4.0))
    before, expected = values(optimizer), grads_of(model)
    overflow(model, optimizer)
    assert optimizer._amp_stash.already_patched
    CLEAN_LATER[then](model, optimizer)
    assert optimizer._amp_stash.already_patched
    assert optimizer._amp_stash.params_have_scaled_gradients == (then == "delayed-block")
    assert optimizer.step() is None
    assert not optimizer._amp_stash.already_patched
    assert_skipped(optimizer, before)
    halvings = {"second-overflow": (2, 0), "overflow-of-another-loss": (1, 1)}.get(then, (1, 0))
    assert scales() == [16.0 / 2 ** halvings[0], 4.0 / 2 ** halvings[1]]
    optimizer.zero_grad()
    backward(model, optimizer)
    optimizer.step()
    assert_stepped(optimizer, before, expected, 1)


@pytest.mark.filterwarnings("error")
@dynamic_levels
@each_make
def test_an_lr_scheduler_that_is_built_while_a_skip_is_due(level, make):
    """Where apex failed. tests/reliability/test_schedulers_count_taken_steps.py has the other times."""
    model, optimizer = initialized(level, make)
    before, expected = values(optimizer), grads_of(model)
    overflow(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.step()
    assert_skipped(optimizer, before)
    optimizer.zero_grad()
    backward(model, optimizer)
    optimizer.step()
    scheduler.step()
    assert_stepped(optimizer, before, expected, 1)
    assert optimizer.param_groups[0]["lr"] == 0.25


@dynamic_levels
def test_fused_sgd_forgets_the_scale_of_a_skipped_step(level):
    model, optimizer = initialized(level, FusedSGD)
    overflow(model, optimizer)
    optimizer.step()
    assert (optimizer.most_recent_scale, optimizer.scale_set_by_backward) == (1.0, False)
