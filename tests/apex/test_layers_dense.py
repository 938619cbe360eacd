"""apex.mlp."""

import pytest
import torch
from apex.mlp import MLP
from torch import nn

from ampctx import AmpTypeError

ACTIVATIONS = {"none": nn.Identity, "relu": nn.ReLU, "sigmoid": nn.Sigmoid}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_mlp(activation, bias):
    module = MLP([5, 4, 3, 2], bias=bias, activation=activation)
    linears = [nn.Linear(i, o, bias=bias) for i, o in ((5, 4), (4, 3), (3, 2))]
    for i, linear in enumerate(linears):
        linear.weight = nn.Parameter(module.weights[i].detach().clone())
        if bias:
            linear.bias = nn.Parameter(module.biases[i].detach().clone())
    reference = nn.Sequential(*(layer for linear in linears for layer in (linear, ACTIVATIONS[activation]())))
    ours, theirs = (torch.ones(6, 5, requires_grad=True) for _ in range(2))
    out, expected = module(ours), reference(theirs)
    assert torch.equal(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    assert torch.equal(ours.grad, theirs.grad)
    for i, linear in enumerate(linears):
        assert torch.equal(module.weights[i].grad, linear.weight.grad)
        if bias:
            assert torch.equal(module.biases[i].grad, linear.bias.grad)


def test_mlp_parameters():
    module = MLP([3, 4, 2])
    shapes = {"weight_0": (4, 3), "bias_0": (4,), "weight_1": (2, 4), "bias_1": (2,)}
    assert {name: p.shape for name, p in module.named_parameters()} == shapes
    assert (module.num_layers, module.mlp_sizes, module.bias, module.activation) == (2, [3, 4, 2], 1, 1)
    assert module.weights[1] is module.weight_1
    assert module.biases[0] is module.bias_0
    assert repr(module) == "MLP(MLP sizes: [3, 4, 2], Bias=1, activation=1)"
    module = MLP((3, 4), bias=False, activation="sigmoid")
    assert list(module.state_dict()) == ["weight_0"]
    assert (module.biases, module.bias, module.activation) == ([], 0, 2)


def test_mlp_initial_values():
    torch.manual_seed(0)
    module = MLP([300, 500])
    assert module.weight_0.std().item() == pytest.approx((2 / 800) ** 0.5, rel=0.02)
    assert module.bias_0.std().item() == pytest.approx((1 / 500) ** 0.5, rel=0.1)


def test_mlp_activation_is_checked():
    with pytest.raises(AmpTypeError, match="activation must be one of none, relu, sigmoid, got 'gelu'"):
        MLP([1, 2], activation="gelu")
