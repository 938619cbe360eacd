"""apex.normalization.fused_layer_norm, over ``F.layer_norm`` and ``F.rms_norm``.

All forms compute in fp32 or wider. The output has the type of the input, or of the weight in the forms whose name has
"Mixed". Under autocast the functions and modules cast their tensors to its type first, so that type is the output's;
the ``apply`` of the autograd classes does not look at autocast. ``memory_efficient`` is taken everywhere and has no
effect: torch keeps the input for the backward pass.
"""

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from ampctx_apex.arguments import without_autocast
from ampctx_apex.autograd_class import AutogradClass, grads, run
from torch import Tensor, nn
from torch.nn import functional as F

from ampctx import AmpValueError

from .._autocast_utils import _cast_if_autocast_enabled

Shape = int | Sequence[int]

# --- what all forms come to -------------------------------------------------------------------------------------------


def _shape(normalized_shape: Shape) -> torch.Size:
    return torch.Size((normalized_shape,) if isinstance(normalized_shape, int) else normalized_shape)


def _common_dtype(*tensors: Tensor | None) -> torch.dtype:
    """The type that holds those of all tensors. Where that is a 16-bit one, torch's kernels compute in fp32 anyway."""
    dtypes = [t.dtype for t in tensors if t is not None]
    return functools.reduce(torch.promote_types, dtypes)


def _to(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)


def _layer_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Shape, eps: float, dtype: torch.dtype
) -> Tensor:
    wide = _common_dtype(input, weight, bias)
    with without_autocast(input):
        return F.layer_norm(input.to(wide), _shape(shape), _to(weight, wide), _to(bias, wide), eps).to(dtype)


def _rms_norm(input: Tensor, weight: Tensor | None, shape: Shape, eps: float | None, dtype: torch.dtype) -> Tensor:
    wide = _common_dtype(input, weight)
    with without_autocast(input):
        return F.rms_norm(input.to(wide), _shape(shape), _to(weight, wide), eps).to(dtype)


# --- the autograd classes, of which clients call ``apply`` ------------------------------------------------------------


class FusedLayerNormFunction(AutogradClass):
    """Called as ``FusedLayerNormFunction.apply(input, normalized_shape, eps, memory_efficient=False)``."""

    @staticmethod
    def apply(input: Tensor, normalized_shape: Shape, eps: float, memory_efficient: bool = False) -> Tensor:
        return _layer_norm(input, None, None, normalized_shape, eps, input.dtype)

    @staticmethod
    def forward(ctx: Any, input: Tensor, normalized_shape: Shape, eps: float, memory_efficient: bool = False) -> Tensor:
        return run(ctx, lambda x: FusedLayerNormFunction.apply(x, normalized_shape, eps), input)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return *grads(ctx, grad_output), None, None, None


class FusedLayerNormAffineFunction(AutogradClass):
    """Called as ``.apply(input, weight, bias, normalized_shape, eps, memory_efficient=False)``."""

    @staticmethod
    def apply(
        input: Tensor, weight: Tensor, bias: Tensor, normalized_shape: Shape, eps: float, memory_efficient: bool = False
    ) -> Tensor:
        return _layer_norm(input, weight, bias, normalized_shape, eps, input.dtype)

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor,
        normalized_shape: Shape,
        eps: float,
        memory_efficient: bool = False,
    ) -> Tensor:
        return run(
            ctx, lambda x, w, b: FusedLayerNormAffineFunction.apply(x, w, b, normalized_shape, eps), input, weight, bias
        )

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return *grads(ctx, grad_output), None, None, None


class FusedLayerNormAffineMixedDtypesFunction(AutogradClass):
    """As ``FusedLayerNormAffineFunction``; the output has the type of ``weight``."""

    @staticmethod
    def apply(
        input: Tensor, weight: Tensor, bias: Tensor, normalized_shape: Shape, eps: float, memory_efficient: bool = False
    ) -> Tensor:
        return _layer_norm(input, weight, bias, normalized_shape, eps, weight.dtype)

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor,
        normalized_shape: Shape,
        eps: float,
        memory_efficient: bool = False,
    ) -> Tensor:
        return run(
            ctx,
            lambda x, w, b: FusedLayerNormAffineMixedDtypesFunction.apply(x, w, b, normalized_shape, eps),
            input,
            weight,
            bias,
        )

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return *grads(ctx, grad_output), None, None, None


class FusedRMSNormFunction(AutogradClass):
    """Called as ``FusedRMSNormFunction.apply(input, normalized_shape, eps, memory_efficient=False)``."""

    @staticmethod
    def apply(input: Tensor, normalized_shape: Shape, eps: float | None, memory_efficient: bool = False) -> Tensor:
        return _rms_norm(input, None, normalized_shape, eps, input.dtype)

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, normalized_shape: Shape, eps: float | None, memory_efficient: bool = False
    ) -> Tensor:
        return run(ctx, lambda x: FusedRMSNormFunction.apply(x, normalized_shape, eps), input)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return *grads(ctx, grad_output), None, None, None


class FusedRMSNormAffineFunction(AutogradClass):
    """Called as ``.apply(input, weight, normalized_shape, eps, memory_efficient=False)``."""

    @staticmethod
    def apply(
        input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float | None, memory_efficient: bool = False
    ) -> Tensor:
        return _rms_norm(input, weight, normalized_shape, eps, input.dtype)

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        normalized_shape: Shape,
        eps: float | None,
        memory_efficient: bool = False,
    ) -> Tensor:
        return run(ctx, lambda x, w: FusedRMSNormAffineFunction.apply(x, w, normalized_shape, eps), input, weight)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return *grads(ctx, grad_output), None, None, None


class FusedRMSNormAffineMixedDtypesFunction(AutogradClass):
    """As ``FusedRMSNormAffineFunction``; the output has the type of ``weight``."""

    @staticmethod
    def apply(
        input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float | None, memory_efficient: bool = False
    ) -> Tensor:
        return _rms_norm(input, weight, normalized_shape, eps, weight.dtype)

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        normalized_shape: Shape,
        eps: float | None,
        memory_efficient: bool = False,
    ) -> Tensor:
        return run(
            ctx, lambda x, w: FusedRMSNormAffineMixedDtypesFunction.apply(x, w, normalized_shape, eps), input, weight
        )

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return *grads(ctx, grad_output), None, None, None


# --- functions --------------------------------------------------------------------------------------------------------


def fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    input, weight, bias = _cast_if_autocast_enabled(input, weight, bias)
    return FusedLayerNormAffineFunction.apply(input, weight, bias, normalized_shape, eps)


def fused_layer_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    (input,) = _cast_if_autocast_enabled(input)
    return FusedLayerNormFunction.apply(input, normalized_shape, eps)


def mixed_dtype_fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    input, weight, bias = _cast_if_autocast_enabled(input, weight, bias)
    return FusedLayerNormAffineMixedDtypesFunction.apply(input, weight, bias, normalized_shape, eps)


def fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float | None = 1e-6, memory_efficient: bool = False
) -> Tensor:
    input, weight = _cast_if_autocast_enabled(input, weight)
    return FusedRMSNormAffineFunction.apply(input, weight, normalized_shape, eps)


def fused_rms_norm(
    input: Tensor, normalized_shape: Shape, eps: float | None = 1e-6, memory_efficient: bool = False
) -> Tensor:
    (input,) = _cast_if_autocast_enabled(input)
    return FusedRMSNormFunction.apply(input, normalized_shape, eps)


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float | None = 1e-6, memory_efficient: bool = False
) -> Tensor:
    input, weight = _cast_if_autocast_enabled(input, weight)
    return FusedRMSNormAffineMixedDtypesFunction.apply(input, weight, normalized_shape, eps)


def manual_rms_norm(input: Tensor, normalized_shape: Shape, weight: Tensor | None, eps: float) -> Tensor:
    """RMS norm over the last ``len(normalized_shape)`` dimensions, computed in fp32.

    The output has the type of a 16-bit weight; otherwise the type that the fp32 result and the weight promote to.
    """
    dtype = torch.promote_types(input.dtype, torch.float32)
    if weight is not None and weight.dtype in (torch.float16, torch.bfloat16):
        dtype = weight.dtype
    wide = input.to(torch.promote_types(input.dtype, torch.float32))
    return _rms_norm(wide, weight, normalized_shape, eps, dtype)


# --- modules ----------------------------------------------------------------------------------------------------------


class FusedLayerNorm(nn.LayerNorm):
    """``torch.nn.LayerNorm`` whose output has the type of its input, also under autocast and with other weights."""

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(_shape(normalized_shape), eps=eps, elementwise_affine=elementwise_affine)
        self.memory_efficient = memory_efficient

    def forward(self, input: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            return F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
        if self.elementwise_affine:
            return fused_layer_norm_affine(input, self.weight, self.bias, self.normalized_shape, self.eps)
        return fused_layer_norm(input, self.normalized_shape, self.eps)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"


class FusedRMSNorm(nn.RMSNorm):
    """``torch.nn.RMSNorm`` whose output has the type of its input. ``eps`` is 1e-5 where torch has that of the type."""

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(_shape(normalized_shape), eps=eps, elementwise_affine=elementwise_affine)
        self.memory_efficient = memory_efficient

    def forward(self, input: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            return F.rms_norm(input, self.normalized_shape, self.weight, self.eps)
        if self.elementwise_affine:
            return fused_rms_norm_affine(input, self.weight, self.normalized_shape, self.eps)
        return fused_rms_norm(input, self.normalized_shape, self.eps)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"


def _refuse_no_affine(name: str, options: dict[str, Any]) -> None:
    if "elementwise_affine" not in options:
        return
    warnings.warn(f"{name} does not support `elementwise_affine` argument", stacklevel=3)
    if not options["elementwise_affine"]:
        raise AmpValueError(f"{name} does not support `elementwise_affine = False`")


class MixedFusedLayerNorm(FusedLayerNorm):
    """``FusedLayerNorm`` whose output has the type of its weight. Always affine; other ``kwargs`` are ignored."""

    def __init__(
        self, normalized_shape: Shape, eps: float = 1e-5, *, memory_efficient: bool = False, **kwargs: Any
    ) -> None:
        _refuse_no_affine("MixedFusedLayerNorm", kwargs)
        super().__init__(normalized_shape, eps, memory_efficient=memory_efficient)

    def forward(self, input: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            return F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
        return mixed_dtype_fused_layer_norm_affine(input, self.weight, self.bias, self.normalized_shape, self.eps)


class MixedFusedRMSNorm(FusedRMSNorm):
    """``FusedRMSNorm`` whose output has the type of its weight. Always affine; other ``kwargs`` are ignored."""

    def __init__(
        self, normalized_shape: Shape, eps: float = 1e-5, *, memory_efficient: bool = False, **kwargs: Any
    ) -> None:
        _refuse_no_affine("MixedFusedRMSNorm", kwargs)
        super().__init__(normalized_shape, eps, memory_efficient=memory_efficient)

    def forward(self, input: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            return F.rms_norm(input, self.normalized_shape, self.weight, self.eps)
        return mixed_dtype_fused_rms_norm_affine(input, self.weight, self.normalized_shape, self.eps)


__all__ = [
    "FusedLayerNorm",
    "FusedLayerNormAffineFunction",
    "FusedLayerNormAffineMixedDtypesFunction",
    "FusedLayerNormFunction",
    "FusedRMSNorm",
    "FusedRMSNormAffineFunction",
    "FusedRMSNormAffineMixedDtypesFunction",
    "FusedRMSNormFunction",
    "MixedFusedLayerNorm",
    "MixedFusedRMSNorm",
    "fused_layer_norm",
    "fused_layer_norm_affine",
    "fused_rms_norm",
    "fused_rms_norm_affine",
    "manual_rms_norm",
    "mixed_dtype_fused_layer_norm_affine",
    "mixed_dtype_fused_rms_norm_affine",
]
