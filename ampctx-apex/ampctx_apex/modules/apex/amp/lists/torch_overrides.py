"""apex.amp.lists.torch_overrides: functions of torch."""

import torch

from ._names import Names

MODULE = torch

_MATRICES = Names.of(
    """
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc addmm addmv addr matmul mm mv
    """
)
# apex left these to cuBLAS 9.1 and later; without CUDA they were in no list.
_BATCHED = ["addbmm", "baddbmm", "bmm"] if torch.version.cuda else []

FP16_FUNCS = Names([*_MATRICES, "prelu", *_BATCHED])
BFLOAT16_FUNCS = Names(_MATRICES)

FP32_FUNCS = Names.of(
    """
    acos asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt sinh tan pow cumprod cumsum dist norm prod std sum
    var renorm
    """
)

CASTS = Names.of("addcdiv addcmul atan2 cross bilinear dot add div mul eq equal ge gt le lt ne")

SEQUENCE_CASTS = Names(["cat", "stack"])

__all__ = ["BFLOAT16_FUNCS", "CASTS", "FP16_FUNCS", "FP32_FUNCS", "MODULE", "SEQUENCE_CASTS"]
