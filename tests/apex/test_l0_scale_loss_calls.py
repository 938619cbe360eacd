"""The ways in which programs call scale_loss and what is in it, and the sequences that skip a step."""

from functools import partial

import pytest
import torch
from amp_models import backward, probe, same, weights
from apex import amp
from apex.amp import _amp_state
from apex.optimizers import FusedSGD
from kit import INF, every_level
from torch import nn

dynamic_levels = pytest.mark.parametrize("level", ["O1", "O2"])
# apex leaves the gradients of masters None without materialize_master_grads. Here they are there, and true, either way.
MAKE = {
    "SGD": partial(torch.optim.SGD, lr=0.125),
    "FusedSGD": partial(FusedSGD, lr=0.125),
    "FusedSGD-not-materialized": partial(FusedSGD, lr=0.125, materialize_master_grads=False),
}
each_make = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)


class Mixed(nn.Module):
    """A ``wide`` fp32 and a ``narrow`` 16-bit parameter, whose gradients are each other's value."""

    def __init__(self, level):
        super().__init__()
        low = torch.bfloat16 if level in ("O4", "O5") else torch.float16
        self.wide = nn.Parameter(torch.tensor([1.0, -0.5, 2.0]))
        self.narrow = nn.Parameter(torch.tensor([1.0, 0.5, 2.0], dtype=low))

    def forward(self):
        return (self.wide * self.narrow).sum()


def initialized(level):
    """A ``Mixed`` as apex's tests initialize it, nothing is cast, with scales of 16 and 4; and its true gradients."""
    model = Mixed(level)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    _amp_state.allow_incoming_model_not_fp32 = True
    try:
        amp.initialize(model, optimizer, opt_level=level, cast_model_type=False, num_losses=2, verbosity=0)
    finally:
        _amp_state.allow_incoming_model_not_fp32 = False
    for scaler, value in zip(_amp_state.loss_scalers, (16.0, 4.0), strict=True):
        scaler._loss_scale = value
    return model, optimizer, [model.narrow.detach().clone(), model.wide.detach().clone()]


def check_grads(optimizer, expected):
    """Every bit: all numbers are sums of few powers of two, which all types hold."""
    for p, grad in zip(amp.master_params(optimizer), expected, strict=True):
        assert torch.equal(p.grad.double(), grad.double())


# --- calls ------------------------------------------------------------------------------------------------------------


@every_level
# torch says, once in a process, that this makes a cycle of references.
@pytest.mark.filterwarnings("ignore:.*create_graph=True")
def test_create_graph(level):
    model, optimizer, expected = initialized(level)
    with amp.scale_loss(model(), optimizer) as scaled:
        scaled.backward(create_graph=True)
    check_grads(optimizer, expected)
    # The gradients lead back to the weights: let go of that.
    for p in [*model.parameters(), *amp.master_params(optimizer)]:
        p.grad = None


@every_level
def test_autograd_grad_with_unscaling_by_hand(level):
    """A penalty on the norm of gradients, as GANs have it: d/dw and d/dn of (|n|^2 + |w|^2) / 4 beside the loss's."""
    model, optimizer, expected = initialized(level)
    narrow, wide = expected
    with amp.scale_loss(model(), optimizer) as scaled:
        grads = torch.autograd.grad(scaled, list(model.parameters()), create_graph=True)
    assert all(torch.equal(g.double(), 16.0 * e.double()) for g, e in zip(grads, expected, strict=True))
    assert [p.grad for p in amp.master_params(optimizer)] == [None, None]
    penalty = sum((g.float() / 16.0).square().sum() for g in grads) / 4
    with amp.scale_loss(model() + penalty, optimizer) as scaled:
        scaled.backward()
    check_grads(optimizer, (narrow + wide / 2, wide + narrow / 2))


@every_level
def test_losses_with_elements(level):
    model, optimizer, expected = initialized(level)
    factors = torch.tensor([1.0, 0.0, -2.0])
    with amp.scale_loss(model.wide * model.narrow, optimizer) as scaled:
        assert scaled.shape == (3,)
        scaled.backward(factors)
    check_grads(optimizer, [grad * factors for grad in expected])


@every_level
@pytest.mark.parametrize("wrap", [lambda o: o, lambda o: [o], lambda o: (o,)], ids=["alone", "list", "tuple"])
@pytest.mark.parametrize("loss_id", [0, 1, -1, -2])
def test_arguments_of_scale_loss(level, wrap, loss_id):
    model, optimizer, expected = initialized(level)
    with amp.scale_loss(model(), wrap(optimizer), loss_id, model) as scaled:
        assert scaled.item() == 4.75 * (16.0, 4.0)[loss_id]
        scaled.backward()
    check_grads(optimizer, expected)


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

# What comes between an overflow and the step, and how often it halves the two scales.
BETWEEN = {
    "clean-backward": (backward, (0, 0)),
    "clean-backward-of-another-loss": (partial(backward, loss_id=1), (0, 0)),
    "second-overflow": (partial(backward, factor=INF), (1, 0)),
    "overflow-of-another-loss": (partial(backward, factor=INF, loss_id=1), (0, 1)),
    "delayed-block": (partial(backward, delay_unscale=True), (0, 0)),
}


@dynamic_levels
@each_make
@pytest.mark.parametrize("between", BETWEEN)
def test_one_step_is_skipped_whatever_comes_before_it(level, make, between):
    model, optimizer = probe(level, make, num_losses=2)
    before, stash = weights(optimizer), optimizer._amp_stash
    backward(model, optimizer, INF)
    assert stash.already_patched
    then, halvings = BETWEEN[between]
    then(model, optimizer)
    assert stash.already_patched
    assert stash.params_have_scaled_gradients == (between == "delayed-block")
    assert optimizer.step() is None
    assert not stash.already_patched
    assert same(weights(optimizer), before)
    if isinstance(optimizer, FusedSGD):
        assert (optimizer.most_recent_scale, optimizer.scale_set_by_backward) == (1.0, False)
    scales = [scaler.loss_scale() for scaler in _amp_state.loss_scalers]
    assert scales == [4096.0 / 2 ** (1 + halvings[0]), 4096.0 / 2 ** halvings[1]]
    backward(model, optimizer, INF)
    optimizer.zero_grad()  # drops this skip, which apex would leave to the next step
    backward(model, optimizer)
    optimizer.step()
    assert same(weights(optimizer), [w - 0.125 for w in before])


@dynamic_levels
@each_make
@pytest.mark.parametrize("bad", [0, 1], ids=["first", "second"])
def test_an_overflow_of_either_loss_skips_the_step(level, make, bad):
    model, optimizer = probe(level, make, num_losses=2)
    before = weights(optimizer)
    for loss_id in range(2):
        backward(model, optimizer, INF if loss_id == bad else 1.0, loss_id=loss_id)
    optimizer.step()
    assert same(weights(optimizer), before)
    assert [scaler.loss_scale() for scaler in _amp_state.loss_scalers] == [4096.0 / (1 + (i == bad)) for i in range(2)]


@pytest.mark.filterwarnings("error")
@dynamic_levels
@each_make
def test_an_lr_scheduler_that_is_built_while_a_skip_is_due(level, make):
    """Where apex failed. tests/reliability/test_schedulers_count_taken_steps.py has the other times."""
    model, optimizer = probe(level, make)
    before = weights(optimizer)
    backward(model, optimizer, INF)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.step()
    assert same(weights(optimizer), before)
    optimizer.zero_grad()
    backward(model, optimizer)
    optimizer.step()
    scheduler.step()
    assert same(weights(optimizer), [w - 0.125 for w in before])
    assert optimizer.param_groups[0]["lr"] == 0.0625
