"""The ways in which programs call scale_loss and what is in it, and the sequences that skip a step."""

import pytest
import torch
from amp_models import BOTH, backward, probe, same, weights
from apex import amp
from apex.amp import _amp_state
from kit import INF, every_level
from torch import nn


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


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("make", BOTH)
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
    assert not same(weights(optimizer), before)
    assert optimizer.param_groups[0]["lr"] == scheduler.base_lrs[0] / 2


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("make", BOTH)
def test_an_overflow_of_one_of_two_losses_skips_the_step_and_lowers_its_scale(level, make, bad):
    model, optimizer = probe(level, make, num_losses=2)
    before = weights(optimizer)
    for loss_id in (0, 1):
        backward(model, optimizer, INF if loss_id == bad else 1.0, loss_id=loss_id)
    optimizer.step()
    assert same(weights(optimizer), before)
    assert [scaler.loss_scale() for scaler in _amp_state.loss_scalers] == [
        2048.0 if loss_id == bad else 4096.0 for loss_id in (0, 1)
    ]
