"""apex.normalization.fused_layer_norm, over ``F.layer_norm`` and ``F.rms_norm``.

All forms compute in fp32 or wider. The output has the type of the input, or of the weight in the forms whose name has
"Mixed". Under autocast the functions and modules cast their tensors to its type first, so that type is the output's;
the ``apply`` of the autograd classes does not look at autocast. ``memory_efficient`` is taken everywhere and has no
effect: torch keeps the input for the backward pass.
"""

import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from ampctx_apex.arguments import without_autocast
from ampctx_apex.autograd_class import AutogradClass, grads, run
from torch import Tensor, nn
from torch.nn import functional as F

from ampctx import AmpValueError

from .._autocast_utils import _cast_if_autocast_enabled

Shape = int | Sequence[int]


def _shape(normalized_shape: Shape) -> torch.Size:
    return torch.Size((normalized_shape,) if isinstance(normalized_shape, int) else normalized_shape)


def _norm(
    function: Callable[..., Tensor],
    like: Tensor,
    tensors: Sequence[Tensor | None],
    normalized_shape: Shape,
    eps: float | None = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """``F.layer_norm`` or ``F.rms_norm`` of input and parameters in the type that holds those of all, of the type of
    ``like``. torch's kernels compute 16-bit types in fp32 anyway."""
    wide = functools.reduce(torch.promote_types, [t.dtype for t in tensors if t is not None])
    input, *parameters = [None if t is None else t.to(wide) for t in tensors]
    with without_autocast(like):
        return function(input, _shape(normalized_shape), *parameters, eps).to(like.dtype)


# --- functions, and the autograd classes of which programs call ``apply`` ---------------------------------------------


def _forms(name: str, class_name: str, norm: Callable[..., Tensor], tensors: str, like: str = "input") -> Any:
    """The function ``name``, which casts to the type of autocast first, and the class whose ``apply`` does not.

    Args:
        tensors: the names of their first arguments, before those of ``_norm``.
        like: which of them has the type of the output.
    """
    names = tensors.split()
    count, missing = len(names), (None,) * ((3 if norm is F.layer_norm else 2) - len(names))
    options = list(inspect.signature(_norm).parameters.values())[3:]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = [inspect.Parameter(name, kind) for name in names] + options

    def call(cast: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        if absent := [name for name in names[len(args) :] if name not in kwargs]:
            raise TypeError(f"{name}() needs {', '.join(absent)}")
        given = cast(*args[:count], *(kwargs.pop(name) for name in names[len(args) :]))
        return _norm(norm, given[names.index(like)], (*given, *missing), *args[count:], **kwargs)

    def function(*args: Any, **kwargs: Any) -> Tensor:
        return call(_cast_if_autocast_enabled, args, kwargs)

    def apply(*args: Any, **kwargs: Any) -> Tensor:
        return call(lambda *tensors: tensors, args, kwargs)

    def forward(ctx: Any, *args: Any, **kwargs: Any) -> Tensor:
        return run(ctx, lambda *given: apply(*given, *args[count:], **kwargs), *args[:count])

    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return *grads(ctx, grad_output), None, None, None

    # Programs look for memory_efficient there.
    vars(function)["__signature__"] = vars(apply)["__signature__"] = inspect.Signature(signature)
    vars(forward)["__signature__"] = inspect.Signature([inspect.Parameter("ctx", kind), *signature])
    function.__name__ = function.__qualname__ = name
    methods: dict[str, Callable[..., Any]] = {"apply": apply, "forward": forward, "backward": backward}
    body = {"__module__": __name__, **{name: staticmethod(method) for name, method in methods.items()}}
    return function, type(class_name, (AutogradClass,), body)


_LAYER, _RMS = "input weight bias", "input weight"
fused_layer_norm, FusedLayerNormFunction = _forms("fused_layer_norm", "FusedLayerNormFunction", F.layer_norm, "input")
fused_layer_norm_affine, FusedLayerNormAffineFunction = _forms(
    "fused_layer_norm_affine", "FusedLayerNormAffineFunction", F.layer_norm, _LAYER
)
mixed_dtype_fused_layer_norm_affine, FusedLayerNormAffineMixedDtypesFunction = _forms(
    "mixed_dtype_fused_layer_norm_affine", "FusedLayerNormAffineMixedDtypesFunction", F.layer_norm, _LAYER, "weight"
)
fused_rms_norm, FusedRMSNormFunction = _forms("fused_rms_norm", "FusedRMSNormFunction", F.rms_norm, "input")
fused_rms_norm_affine, FusedRMSNormAffineFunction = _forms(
    "fused_rms_norm_affine", "FusedRMSNormAffineFunction", F.rms_norm, _RMS
)
mixed_dtype_fused_rms_norm_affine, FusedRMSNormAffineMixedDtypesFunction = _forms(
    "mixed_dtype_fused_rms_norm_affine", "FusedRMSNormAffineMixedDtypesFunction", F.rms_norm, _RMS, "weight"
)


def manual_rms_norm(input: Tensor, normalized_shape: Shape, weight: Tensor | None, eps: float) -> Tensor:
    """RMS norm over the last ``len(normalized_shape)`` dimensions, computed in fp32.

    The output has the type of a 16-bit weight; otherwise the type that the fp32 result and the weight promote to.
    """
    wide = input.to(torch.promote_types(input.dtype, torch.float32))
    like = weight if weight is not None and weight.dtype in (torch.float16, torch.bfloat16) else wide
    return _norm(F.rms_norm, like, (wide, weight), normalized_shape, eps)


# --- modules ----------------------------------------------------------------------------------------------------------


class _Fused(nn.Module):
    """Mixin of the modules, which adds to torch's: apex's arguments, and an output of the type of the input."""

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(_shape(normalized_shape), eps=eps, elementwise_affine=elementwise_affine)
        self.memory_efficient = memory_efficient

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"


class _Mixed(nn.Module):
    """The arguments of the modules that are always affine; other ``kwargs`` are ignored."""

    def __init__(
        self, normalized_shape: Shape, eps: float = 1e-5, *, memory_efficient: bool = False, **kwargs: Any
    ) -> None:
        if "elementwise_affine" in kwargs:
            name = next(kind.__name__ for kind in type(self).__mro__ if kind.__module__ == __name__)
            warnings.warn(f"{name} does not support `elementwise_affine` argument", stacklevel=2)
            if not kwargs["elementwise_affine"]:
                raise AmpValueError(f"{name} does not support `elementwise_affine = False`")
        super().__init__(normalized_shape, eps, memory_efficient=memory_efficient)


class FusedLayerNorm(_Fused, nn.LayerNorm):
    """``torch.nn.LayerNorm`` whose output has the type of its input, also under autocast and with other weights."""

    _affine = staticmethod(fused_layer_norm_affine)

    def forward(self, input: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            return F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
        if self.elementwise_affine:
            return self._affine(input, self.weight, self.bias, self.normalized_shape, self.eps)
        return fused_layer_norm(input, self.normalized_shape, self.eps)


class FusedRMSNorm(_Fused, nn.RMSNorm):
    """``torch.nn.RMSNorm`` whose output has the type of its input. ``eps`` is 1e-5 where torch has that of the type."""

    _affine = staticmethod(fused_rms_norm_affine)

    def forward(self, input: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            return F.rms_norm(input, self.normalized_shape, self.weight, self.eps)
        if self.elementwise_affine:
            return self._affine(input, self.weight, self.normalized_shape, self.eps)
        return fused_rms_norm(input, self.normalized_shape, self.eps)


class MixedFusedLayerNorm(_Mixed, FusedLayerNorm):
    """``FusedLayerNorm`` whose output has the type of its weight. Always affine; other ``kwargs`` are ignored."""

    _affine = staticmethod(mixed_dtype_fused_layer_norm_affine)


class MixedFusedRMSNorm(_Mixed, FusedRMSNorm):
    """``FusedRMSNorm`` whose output has the type of its weight. Always affine; other ``kwargs`` are ignored."""

    _affine = staticmethod(mixed_dtype_fused_rms_norm_affine)


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
