"""apex.fused_dense: torch.nn.Linear, and two of them with a GELU between."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)

from .fused_dense import (
    DenseNoBiasFunc,
    FusedDense,
    FusedDenseFunc,
    FusedDenseGeluDense,
    FusedDenseGeluDenseFunc,
    _dense_no_bias,
    _fused_dense,
    _fused_dense_gelu_dense,
    dense_no_bias_function,
    fused_dense_function,
    fused_dense_gelu_dense_function,
)

__all__ = [
    "DenseNoBiasFunc",
    "FusedDense",
    "FusedDenseFunc",
    "FusedDenseGeluDense",
    "FusedDenseGeluDenseFunc",
    "_dense_no_bias",
    "_fused_dense",
    "_fused_dense_gelu_dense",
    "dense_no_bias_function",
    "fused_dense_function",
    "fused_dense_gelu_dense_function",
]
