"""apex.amp.lists.tensor_overrides: methods of torch.Tensor, and those functions of torch that are methods, too."""

import torch

from ..compat import filter_attrs
from . import torch_overrides
from ._names import Names

MODULE = torch.Tensor

_OPERATORS = Names.of(
    """
    __add__ __div__ __eq__ __ge__ __gt__ __iadd__ __idiv__ __imul__ __isub__ __itruediv__ __le__ __lt__ __mul__ __ne__
    __radd__ __rdiv__ __rmul__ __rsub__ __rtruediv__ __sub__ __truediv__
    """
)


def _with_methods(own: list[str], functions: list[str]) -> Names:
    return Names([*own, *filter_attrs(MODULE, functions)])


FP16_FUNCS = _with_methods(["__matmul__"], torch_overrides.FP16_FUNCS)
BFLOAT16_FUNCS = _with_methods(["__matmul__"], torch_overrides.BFLOAT16_FUNCS)
FP32_FUNCS = _with_methods(["__ipow__", "__pow__", "__rpow__", "cpu"], torch_overrides.FP32_FUNCS)
CASTS = _with_methods(filter_attrs(MODULE, _OPERATORS), torch_overrides.CASTS)
SEQUENCE_CASTS = _with_methods([], torch_overrides.SEQUENCE_CASTS)

__all__ = ["BFLOAT16_FUNCS", "CASTS", "FP16_FUNCS", "FP32_FUNCS", "MODULE", "SEQUENCE_CASTS"]
