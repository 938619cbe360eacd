"""Weights under per-op casts: used once, twice, in training and evaluation, and changed in between."""

import pytest
import torch
from apex import amp
from l0 import assert_exact, incoming_16_bit, low_of, set_scales
from torch import nn

OPS = {
    "low-mm": lambda x, weight: torch.mm(x, weight),
    "fp32-pow": lambda x, weight: x * torch.pow(weight, 2.0),
    "promote-mul": lambda x, weight: torch.mul(x, weight),
}


class OneOp(nn.Module):
    """An op of each kind of cast on one weight, ``times`` times within a forward."""

    def __init__(self, op, dtype):
        super().__init__()
        self.op = OPS[op]
        self.weight = nn.Parameter(torch.tensor([[1.0, 0.5], [-2.0, 4.0]], dtype=dtype))

    def forward(self, x, times=1):
        y = self.op(x, self.weight)
        return y if times == 1 else y + self.op(x * 2, self.weight)


def x(dtype=torch.float32):
    return torch.tensor([[0.5, 1.0], [2.0, -1.0]], dtype=dtype)


def reference(op, times, weight):
    """Output and gradient in fp64, without casts."""
    model = OneOp(op, torch.float64)
    model.weight.data.copy_(weight.detach())
    with torch.autocast("cpu", enabled=False), torch.enable_grad():
        out = model(x(torch.float64), times)
        out.sum().backward()
    return out.detach(), model.weight.grad


@pytest.fixture
def make():
    def made(level, op, kept_low):
        model = OneOp(op, low_of(level) if kept_low else torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        with incoming_16_bit():
            amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        set_scales(4.0)
        return model, optimizer

    return made


every_module = pytest.mark.parametrize("op", OPS)
every_weight = pytest.mark.parametrize("kept_low", [False, True], ids=["fp32-weight", "16-bit-weight"])
every_level = pytest.mark.parametrize("level", ["O1", "O4"])


def train(model, optimizer, op, times):
    """A step, its gradient and its effect compared with the reference."""
    before = model.weight.detach().clone()
    out = model(x(), times)
    with amp.scale_loss(out.sum(), optimizer) as scaled:
        scaled.backward()
    expected_out, expected_grad = reference(op, times, before)
    assert_exact(out, expected_out)
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["weight"]
    assert model.weight.grad.dtype == model.weight.dtype
    assert_exact(model.weight.grad, expected_grad)
    optimizer.step()
    assert_exact(model.weight, before.double() - 0.5 * expected_grad)
    optimizer.zero_grad()


@every_level
@every_weight
@every_module
def test_train_evaluate_and_train_with_reuse(make, level, op, kept_low):
    model, optimizer = make(level, op, kept_low)
    train(model, optimizer, op, times=1)
    with torch.no_grad():
        out = model(x())
    assert not out.requires_grad
    assert_exact(out, reference(op, 1, model.weight)[0])
    train(model, optimizer, op, times=2)


@every_level
@every_weight
@every_module
def test_evaluation_sees_weights_that_changed(make, level, op, kept_low):
    """apex cleared its cache at the exit of scale_loss alone."""
    model, _ = make(level, op, kept_low)
    for factor in (1.0, -0.5, 4.0):
        with torch.no_grad():
            model.weight.mul_(factor)
            assert_exact(model(x(), times=2), reference(op, 2, model.weight)[0])


@every_level
def test_clearing_the_cache_between_forward_and_backward(make, level):
    model, optimizer = make(level, "low-mm", False)
    expected = reference("low-mm", 2, model.weight)[1]
    with amp.scale_loss(model(x(), times=2).sum(), optimizer) as scaled:
        amp._amp_state.handle._clear_cache()
        scaled.backward()
    assert_exact(model.weight.grad, expected)
