"""apex.mlp: a chain of linear layers, each followed by the same activation, over ``F.linear``."""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampctx import AmpTypeError

# By apex's numbers: none, relu, sigmoid.
ACTIVATIONS = (lambda x: x, F.relu, torch.sigmoid)
NAMES = ("none", "relu", "sigmoid")


class MLP(nn.Module):
    """Linear layers, each followed by the activation, the last one too. Parameters ``weight_0``, ``bias_0``, ...

    Args:
        mlp_sizes: the sizes of the input, of each hidden layer and of the output.
        bias: whether the layers have a bias.
        activation: 'none', 'relu' or 'sigmoid'.

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
        biases = self.biases if self.bias else [None] * self.num_layers
        for weight, bias in zip(self.weights, biases, strict=True):
            input = ACTIVATIONS[self.activation](F.linear(input, weight, bias))
        return input

    def extra_repr(self) -> str:
        return f"MLP sizes: {self.mlp_sizes}, Bias={self.bias}, activation={self.activation}"
