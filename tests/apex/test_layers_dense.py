"""apex.mlp and apex.fused_dense."""

import copy
import importlib

import pytest
import torch
from apex.fused_dense import FusedDense, FusedDenseGeluDense, fused_dense
from apex.mlp import MLP, MlpFunction, mlp, mlp_function
from torch import nn
from torch.nn import functional as F

from ampctx import AmpTypeError, amp

ACTIVATIONS = {"none": nn.Identity, "relu": nn.ReLU, "sigmoid": nn.Sigmoid}


def same_results(module, reference, x):
    """Output, and gradients of input and of all parameters in their order by kind."""
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, expected = module(ours), reference(theirs)
    assert torch.equal(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    assert torch.equal(ours.grad, theirs.grad)


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
    same_results(module, reference, torch.randn(6, 5))
    for i, linear in enumerate(linears):
        assert torch.equal(module.weights[i].grad, linear.weight.grad)
        if bias:
            assert torch.equal(module.biases[i].grad, linear.bias.grad)


def test_mlp_parameters():
    module = MLP([3, 4, 2])
    assert {name: tuple(p.shape) for name, p in module.named_parameters()} == {
        "weight_0": (4, 3),
        "bias_0": (4,),
        "weight_1": (2, 4),
        "bias_1": (2,),
    }
    assert (module.num_layers, module.mlp_sizes, module.bias, module.activation) == (2, [3, 4, 2], 1, 1)
    assert module.weights[1] is module.weight_1
    assert module.biases[0] is module.bias_0
    assert repr(module) == "MLP(MLP sizes: [3, 4, 2], Bias=1, activation=1)"


def test_mlp_without_bias():
    module = MLP((3, 4), bias=False, activation="sigmoid")
    assert list(module.state_dict()) == ["weight_0"]
    assert (module.biases, module.bias, module.activation) == ([], 0, 2)


def test_mlp_initial_values():
    torch.manual_seed(0)
    module = MLP([300, 500])
    assert module.weight_0.std().item() == pytest.approx((2 / 800) ** 0.5, rel=0.02)
    assert module.bias_0.std().item() == pytest.approx((1 / 500) ** 0.5, rel=0.1)


def test_mlp_lists_follow_the_module():
    module = MLP([3, 2])
    other = copy.deepcopy(module)
    assert other.weights[0] is other.weight_0
    module.load_state_dict({name: torch.ones_like(p) for name, p in module.state_dict().items()}, assign=True)
    assert module(torch.ones(1, 3)).tolist() == [[4.0, 4.0]]


def test_mlp_activation_is_checked():
    with pytest.raises(AmpTypeError, match="activation must be one of none, relu, sigmoid, got 'gelu'"):
        MLP([1, 2], activation="gelu")
    assert issubclass(AmpTypeError, TypeError)


def test_mlp_function():
    x, weights, biases = torch.randn(2, 3), [torch.randn(4, 3), torch.randn(1, 4)], [torch.randn(4), torch.randn(1)]
    expected = F.linear(F.relu(F.linear(x, weights[0], biases[0])), weights[1], biases[1]).relu()
    assert torch.equal(mlp_function(1, 1, x, *weights, *biases), expected)
    assert torch.equal(MlpFunction.apply(1, 1, x, *weights, *biases), expected)
    assert torch.equal(mlp_function(0, 0, x, *weights), x @ weights[0].t() @ weights[1].t())
    assert mlp.MLP is MLP


# --- fused_dense ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
def test_fused_dense(bias):
    module, reference = FusedDense(3, 4, bias=bias), nn.Linear(3, 4, bias=bias)
    reference.load_state_dict(module.state_dict())
    assert list(module.state_dict()) == (["weight", "bias"] if bias else ["weight"])
    same_results(module, reference, torch.randn(5, 3))
    assert torch.equal(module.weight.grad, reference.weight.grad)


def test_fused_dense_gelu_dense():
    module = FusedDenseGeluDense(3, 8, 2)
    assert {name: tuple(p.shape) for name, p in module.named_parameters()} == {
        "weight1": (8, 3),
        "bias1": (8,),
        "weight2": (2, 8),
        "bias2": (2,),
    }
    assert (module.in_features, module.intermediate_features, module.out_features) == (3, 8, 2)
    reference = nn.Sequential(nn.Linear(3, 8), nn.GELU("tanh"), nn.Linear(8, 2))
    reference.load_state_dict(dict(zip(reference.state_dict(), module.state_dict().values(), strict=True)))
    same_results(module, reference, torch.randn(5, 3))
    for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("module", [FusedDense(64, 64), FusedDenseGeluDense(64, 64, 64)], ids=["one", "two"])
def test_parameters_have_initial_values(module):
    for p in module.parameters():
        assert 0.0 < p.abs().max() <= 1 / 8


def test_two_layers_have_a_bias():
    with pytest.raises(AssertionError, match="FusedDenseGeluDense has a bias always"):
        FusedDenseGeluDense(3, 4, 2, bias=False)


@pytest.mark.parametrize(
    ("function", "kind", "shapes"),
    [
        ("_fused_dense", "FusedDenseFunc", [(4, 3), (4,)]),
        ("_dense_no_bias", "DenseNoBiasFunc", [(4, 3)]),
        ("_fused_dense_gelu_dense", "FusedDenseGeluDenseFunc", [(4, 3), (4,), (2, 4), (2,)]),
    ],
)
def test_functions_and_their_autograd_classes(function, kind, shapes):
    x, parameters = torch.randn(5, 3), [torch.randn(shape) for shape in shapes]
    out = F.linear(x, *parameters[:2])
    if len(parameters) == 4:
        out = F.linear(F.gelu(out, approximate="tanh"), *parameters[2:])
    for owner in (fused_dense, importlib.import_module("apex.fused_dense")):
        assert torch.equal(getattr(owner, function)(x, *parameters), out)
        assert torch.equal(getattr(owner, kind).apply(x, *parameters), out)


@pytest.mark.parametrize(("level", "dtype"), [("O0", torch.float32), ("O1", torch.float16), ("O2", torch.float16)])
@pytest.mark.parametrize(
    "make", [lambda: MLP([4, 4]), lambda: FusedDense(4, 4), lambda: FusedDenseGeluDense(4, 8, 4)], ids=range(3)
)
def test_type_of_the_output(make, level, dtype):
    model = nn.Sequential(make())
    seen = []
    model[0].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0)
    model(torch.randn(2, 4))
    assert seen == [dtype]
