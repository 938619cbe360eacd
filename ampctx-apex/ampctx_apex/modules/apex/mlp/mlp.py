"""apex.mlp.mlp, over ``F.linear``."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from ampctx_apex.autograd_class import AutogradClass, grads, run
from torch import Tensor, nn
from torch.nn import functional as F

from ampctx import AmpTypeError

# By apex's numbers: none, relu, sigmoid.
ACTIVATIONS = (lambda x: x, F.relu, torch.sigmoid)
NAMES = ("none", "relu", "sigmoid")


def mlp_function(bias: int, activation: int, *args: Tensor) -> Tensor:
    """Linear layers, each followed by the activation, the last one too.

    Args:
        bias: 1 where the layers have a bias, else 0.
        activation: 0 none, 1 relu, 2 sigmoid.
        args: the input [*, in], all weights [out, in], and with ``bias`` all biases [out].
    """
    x, *parameters = args
    layers = len(parameters) // 2 if bias else len(parameters)
    biases: Sequence[Tensor | None] = parameters[layers:] if bias else [None] * layers
    for weight, b in zip(parameters[:layers], biases, strict=True):
        x = ACTIVATIONS[activation](F.linear(x, weight, b))
    return x


class MlpFunction(AutogradClass):
    """Called as ``MlpFunction.apply(bias, activation, *args)``."""

    apply = staticmethod(mlp_function)

    @staticmethod
    def forward(ctx: Any, bias: int, activation: int, *args: Tensor) -> Tensor:
        return run(ctx, lambda *t: mlp_function(bias, activation, *t), *args)

    @staticmethod
    def backward(ctx: Any, grad_o: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *grads(ctx, grad_o)


class MLP(nn.Module):
    """``mlp_function`` over parameters named ``weight_0``, ``bias_0``, ``weight_1``, ...

    Args:
        mlp_sizes: the sizes of the input, of each hidden layer and of the output.
        bias: whether the layers have a bias.
        activation: 'none', 'relu' or 'sigmoid', after every layer, the last one too.

    Raises:
        AmpTypeError: another activation.
    """

    def __init__(self, mlp_sizes: Sequence[int], bias: bool = True, activation: str = "relu") -> None:
        super().__init__()
        if activation not in NAMES:
            raise AmpTypeError(f"activation must be one of {', '.join(NAMES)}, got {activation!r}")
        self.num_layers = len(mlp_sizes) - 1
        self.mlp_sizes = list(mlp_sizes)
        self.bias = 1 if bias else 0
        self.activation = NAMES.index(activation)
        for i, (fan_in, fan_out) in enumerate(pairwise(mlp_sizes)):
            self.register_parameter(f"weight_{i}", nn.Parameter(torch.empty(fan_out, fan_in)))
            if bias:
                self.register_parameter(f"bias_{i}", nn.Parameter(torch.empty(fan_out)))
        self.reset_parameters()

    # Looked up each time, so that they are what the module has after a load with assign=True, a deep copy or a swap.
    @property
    def weights(self) -> list[nn.Parameter]:
        return [self.get_parameter(f"weight_{i}") for i in range(self.num_layers)]

    @property
    def biases(self) -> list[nn.Parameter]:
        return [self.get_parameter(f"bias_{i}") for i in range(self.num_layers)] if self.bias else []

    def reset_parameters(self) -> None:
        for weight in self.weights:
            nn.init.normal_(weight, 0.0, math.sqrt(2.0 / (weight.size(0) + weight.size(1))))
        for bias in self.biases:
            nn.init.normal_(bias, 0.0, math.sqrt(1.0 / bias.size(0)))

    def forward(self, input: Tensor) -> Tensor:
        return mlp_function(self.bias, self.activation, input, *self.weights, *self.biases)

    def extra_repr(self) -> str:
        return f"MLP sizes: {self.mlp_sizes}, Bias={self.bias}, activation={self.activation}"


__all__ = ["MLP", "MlpFunction", "mlp_function"]
