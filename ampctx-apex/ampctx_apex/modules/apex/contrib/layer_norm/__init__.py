"""apex.contrib.layer_norm: a LayerNorm over the last dimension, of any size; apex had a list of sizes."""

from typing import Any

import torch
from ampctx_apex.autograd_class import AutogradClass
from torch import Tensor, nn

from ...normalization.fused_layer_norm import (
    FusedLayerNormAffineMixedDtypesFunction,
    mixed_dtype_fused_layer_norm_affine,
)


class FastLayerNorm(nn.Module):
    """LayerNorm over the last dimension of ``hidden_size``; the output has the type of ``weight``.

    ``memory_efficient`` is taken and has no effect.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-5, memory_efficient: bool = False) -> None:
        super().__init__()
        self.epsilon = eps
        self.memory_efficient = memory_efficient
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.bias = nn.Parameter(torch.empty(hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return _fast_layer_norm(x, self.weight, self.bias, self.epsilon, self.memory_efficient)


class FastLayerNormFN(AutogradClass):
    """Called as ``FastLayerNormFN.apply(x, gamma, beta, epsilon, memory_efficient=False)``."""

    @staticmethod
    def apply(x: Tensor, gamma: Tensor, beta: Tensor, epsilon: float, memory_efficient: bool = False) -> Tensor:
        return FusedLayerNormAffineMixedDtypesFunction.apply(x, gamma, beta, gamma.shape, epsilon, memory_efficient)

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gamma: Tensor, beta: Tensor, epsilon: float, memory_efficient: bool = False
    ) -> Tensor:
        return FusedLayerNormAffineMixedDtypesFunction.forward(
            ctx, x, gamma, beta, gamma.shape, epsilon, memory_efficient
        )

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return FusedLayerNormAffineMixedDtypesFunction.backward(ctx, dy)[:5]


def _fast_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float, memory_efficient: bool) -> Tensor:
    return mixed_dtype_fused_layer_norm_affine(x, weight, bias, weight.shape, epsilon, memory_efficient)


__all__ = ["FastLayerNorm", "FastLayerNormFN", "_fast_layer_norm"]
