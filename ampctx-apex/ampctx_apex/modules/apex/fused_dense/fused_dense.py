"""apex.fused_dense.fused_dense, over ``F.linear``."""

from typing import Any

from ampctx_apex.autograd_class import AutogradClass, grads, run
from torch import Tensor, nn
from torch.nn import functional as F

from ampctx import AmpAssertionError


def _fused_dense(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(input, weight, bias)


def _dense_no_bias(input: Tensor, weight: Tensor) -> Tensor:
    return F.linear(input, weight)


def _fused_dense_gelu_dense(input: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor) -> Tensor:
    # cuBLASLt's GELU, which apex's kernel took, is the one by tanh.
    return F.linear(F.gelu(F.linear(input, weight1, bias1), approximate="tanh"), weight2, bias2)


class FusedDenseFunc(AutogradClass):
    """Called as ``FusedDenseFunc.apply(input, weight, bias)``."""

    apply = staticmethod(_fused_dense)

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return run(ctx, _fused_dense, input, weight, bias)

    backward = staticmethod(grads)


class DenseNoBiasFunc(AutogradClass):
    """Called as ``DenseNoBiasFunc.apply(input, weight)``."""

    apply = staticmethod(_dense_no_bias)

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor) -> Tensor:
        return run(ctx, _dense_no_bias, input, weight)

    backward = staticmethod(grads)


class FusedDenseGeluDenseFunc(AutogradClass):
    """Called as ``FusedDenseGeluDenseFunc.apply(input, weight1, bias1, weight2, bias2)``."""

    apply = staticmethod(_fused_dense_gelu_dense)

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor) -> Tensor:
        return run(ctx, _fused_dense_gelu_dense, input, weight1, bias1, weight2, bias2)

    backward = staticmethod(grads)


# The names of these functions until 2022.
fused_dense_function = _fused_dense
dense_no_bias_function = _dense_no_bias
fused_dense_gelu_dense_function = _fused_dense_gelu_dense


class FusedDense(nn.Linear):
    """``torch.nn.Linear``, with its initial values too: apex left the parameters uninitialised."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias)


class FusedDenseGeluDense(nn.Module):
    """Linear, GELU (by tanh), linear; parameters ``weight1``, ``bias1``, ``weight2``, ``bias2`` as torch.nn.Linear's.

    Raises:
        AmpAssertionError: ``bias=False``.
    """

    def __init__(self, in_features: int, intermediate_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        if not bias:
            raise AmpAssertionError("FusedDenseGeluDense has a bias always: use torch.nn.Linear and torch.nn.GELU")
        self.in_features = in_features
        self.intermediate_features = intermediate_features
        self.out_features = out_features
        first = nn.Linear(in_features, intermediate_features)
        second = nn.Linear(intermediate_features, out_features)
        self.weight1, self.bias1 = first.weight, first.bias
        self.weight2, self.bias2 = second.weight, second.bias

    def forward(self, input: Tensor) -> Tensor:
        return _fused_dense_gelu_dense(input, self.weight1, self.bias1, self.weight2, self.bias2)


__all__ = ["FusedDense", "FusedDenseGeluDense"]
