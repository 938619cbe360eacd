"""The functions of fused_layer_norm_cuda on torch's ops: layer norm and RMS norm, with their gradients.

Signatures are apex's. They compute in fp32, or fp64 where a tensor has it. Statistics have one element for each row,
fp32 or fp64. Any strides are allowed. The gradients are differentiable with respect to the tensors that they take.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ampctx import AmpValueError
from ampctx_apex.arguments import check_tensor, without_autocast

Shape = int | Sequence[int]
_FLOATING = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def _checked_shape(op: str, name: str, t: Tensor, normalized_shape: Shape) -> torch.Size:
    shape = torch.Size((normalized_shape,) if isinstance(normalized_shape, int) else normalized_shape)
    if not shape:
        raise AmpValueError(f"{op}: normalized_shape is empty, expected one dimension or more")
    if t.shape[-len(shape) :] != shape:
        raise AmpValueError(f"{op}: {name} has shape {tuple(t.shape)}, expected [*, {', '.join(map(str, shape))}]")
    return shape


class _Rows(NamedTuple):
    """Tensors [rows, columns] and parameters [columns], all of one type."""

    shape: torch.Size
    rows: int
    columns: int
    dtype: torch.dtype

    def of(self, t: Tensor) -> Tensor:
        return t.reshape(self.rows, self.columns).to(self.dtype)

    def parameter(self, t: Tensor) -> Tensor:
        return t.reshape(self.columns).to(self.dtype)

    def statistic(self, t: Tensor) -> Tensor:
        return t.reshape(self.rows, 1).to(self.dtype)


def _rows(op: str, name: str, t: Tensor, normalized_shape: Shape, parameters: Mapping[str, Tensor]) -> _Rows:
    check_tensor(op, name, t, dtypes=_FLOATING)
    shape = _checked_shape(op, name, t, normalized_shape)
    for parameter, value in parameters.items():
        check_tensor(op, parameter, value, dtypes=_FLOATING, shape=shape, beside=(name, t))
    dtypes = [torch.float32, t.dtype, *(value.dtype for value in parameters.values())]
    return _Rows(
        shape, math.prod(t.shape[: -len(shape)]), math.prod(shape), functools.reduce(torch.promote_types, dtypes)
    )


def _normed(
    op: str, input: Tensor, shape: Shape, parameters: Mapping[str, Tensor], eps: float, *,
    centers: bool, of_weight: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Output, of the type of ``weight`` or of ``input``, mean and inverse deviation."""
    rows = _rows(op, "input", input, shape, parameters)
    weight, bias = parameters.get("weight"), parameters.get("bias")
    with without_autocast(input):
        x = rows.of(input)
        mean = x.mean(1, keepdim=True) if centers else x.new_zeros(rows.rows, 1)
        x = x - mean if centers else x
        invvar = (x.square().mean(1, keepdim=True) + eps).rsqrt()
        x = x * invvar
        if weight is not None:
            x = x * rows.parameter(weight)
        if bias is not None:
            x = x + rows.parameter(bias)
        kept = torch.promote_types(input.dtype, torch.float32)
        dtype = weight.dtype if of_weight and weight is not None else input.dtype
        return x.to(dtype).reshape(input.shape), mean.flatten().to(kept), invvar.flatten().to(kept)


def _grads(
    op: str, dout: Tensor, mean: Tensor | None, invvar: Tensor, input_or_output: Tensor, shape: Shape,
    parameters: Mapping[str, Tensor], eps: float, memory_efficient: bool, *, centers: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """The gradients of input, weight and bias."""
    rows = _rows(op, "input_or_output", input_or_output, shape, parameters)
    weight, bias = parameters.get("weight"), parameters.get("bias")
    beside = ("input_or_output", input_or_output)
    check_tensor(op, "dout", dout, dtypes=_FLOATING, shape=input_or_output.shape, beside=beside)
    check_tensor(op, "invvar", invvar, dtypes=_FLOATING, shape=(rows.rows,), beside=beside)
    if centers and not memory_efficient:
        mean = check_tensor(op, "mean", mean, dtypes=_FLOATING, shape=(rows.rows,), beside=beside)
    with without_autocast(dout):
        dy, scale = rows.of(dout), None if weight is None else rows.parameter(weight)
        normed = rows.of(input_or_output)
        if memory_efficient:
            if bias is not None:
                normed = normed - rows.parameter(bias)
            if scale is not None:
                # apex's bound, so that a weight of 0 gives no inf.
                normed = normed / torch.where(scale < 0, scale.clamp(max=-eps), scale.clamp(min=eps))
        else:
            if mean is not None and centers:
                normed = normed - rows.statistic(mean)
            normed = normed * rows.statistic(invvar)
        g = dy if scale is None else dy * scale
        dx = g - normed * (g * normed).mean(1, keepdim=True)
        if centers:
            dx = dx - g.mean(1, keepdim=True)
        dx = (dx * rows.statistic(invvar)).to(input_or_output.dtype).reshape(input_or_output.shape)
        dweight = None if weight is None else (dy * normed).sum(0).to(weight.dtype).reshape(rows.shape)
        dbias = None if bias is None else dy.sum(0).to(bias.dtype).reshape(rows.shape)
        return dx, dweight, dbias


def forward(input: Tensor, normalized_shape: Shape, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Layer norm over the last ``len(normalized_shape)`` dimensions. No host sync.

    Args:
        input: [*, normalized_shape], fp32, fp16, bf16 or fp64.
        eps: added to the variance.

    Returns:
        The output, like ``input``; mean and 1 / deviation of each row, [rows], fp32 (fp64 for fp64 input).

    Raises:
        AmpTypeError, AmpValueError: another dtype, shape or device, with the name of the argument.
    """
    return _normed("forward", input, normalized_shape, {}, eps, centers=True)


def forward_affine(
    input: Tensor, normalized_shape: Shape, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """``forward`` times ``weight`` plus ``bias``, both [normalized_shape] and of any floating type."""
    return _normed("forward_affine", input, normalized_shape, {"weight": weight, "bias": bias}, eps, centers=True)


def forward_affine_mixed_dtypes(
    input: Tensor, normalized_shape: Shape, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """``forward_affine`` with an output of the type of ``weight``."""
    op = "forward_affine_mixed_dtypes"
    return _normed(op, input, normalized_shape, {"weight": weight, "bias": bias}, eps, centers=True, of_weight=True)


def backward(
    dout: Tensor, mean: Tensor | None, invvar: Tensor, input_or_output: Tensor, normalized_shape: Shape, eps: float,
    memory_efficient: bool = False,
) -> Tensor:  # fmt: skip
    """The gradient of ``forward``'s input. No host sync.

    Args:
        dout: the gradient of the output, of the shape of ``input_or_output`` and any floating type.
        mean, invvar: what ``forward`` returned. ``mean`` may be None with ``memory_efficient``.
        input_or_output: the input; with ``memory_efficient`` the output.

    Returns:
        The gradient, like ``input_or_output``.

    Raises:
        AmpTypeError, AmpValueError: another dtype, shape or device, with the name of the argument.
    """
    return _grads(
        "backward", dout, mean, invvar, input_or_output, normalized_shape, {}, eps, memory_efficient,
        centers=True,
    )[0]  # fmt: skip


def backward_affine(
    dout: Tensor, mean: Tensor | None, invvar: Tensor, input_or_output: Tensor, normalized_shape: Shape,
    weight: Tensor, bias: Tensor, eps: float, memory_efficient: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """The gradients of input, weight and bias of ``forward_affine`` and ``forward_affine_mixed_dtypes``.

    With ``memory_efficient`` a weight nearer to 0 than ``eps`` counts as ``eps``. Arguments as in ``backward``.
    """
    return _grads(
        "backward_affine", dout, mean, invvar, input_or_output, normalized_shape, {"weight": weight, "bias": bias}, eps,
        memory_efficient, centers=True,
    )  # fmt: skip


def rms_forward(input: Tensor, normalized_shape: Shape, eps: float) -> tuple[Tensor, Tensor]:
    """RMS norm, as ``forward`` for layer norm. Returns the output and 1 / root mean square of each row."""
    return _normed("rms_forward", input, normalized_shape, {}, eps, centers=False)[::2]


def rms_forward_affine(input: Tensor, normalized_shape: Shape, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``rms_forward`` times ``weight``, [normalized_shape] and of any floating type."""
    return _normed("rms_forward_affine", input, normalized_shape, {"weight": weight}, eps, centers=False)[::2]


def rms_forward_affine_mixed_dtypes(
    input: Tensor, normalized_shape: Shape, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """``rms_forward_affine`` with an output of the type of ``weight``."""
    op = "rms_forward_affine_mixed_dtypes"
    return _normed(op, input, normalized_shape, {"weight": weight}, eps, centers=False, of_weight=True)[::2]


def rms_backward(
    dout: Tensor, invvar: Tensor, input_or_output: Tensor, normalized_shape: Shape, eps: float,
    memory_efficient: bool = False,
) -> Tensor:  # fmt: skip
    """The gradient of ``rms_forward``'s input. Arguments as in ``backward``."""
    return _grads(
        "rms_backward", dout, None, invvar, input_or_output, normalized_shape, {}, eps, memory_efficient,
        centers=False,
    )[0]  # fmt: skip


def rms_backward_affine(
    dout: Tensor, invvar: Tensor, input_or_output: Tensor, normalized_shape: Shape, weight: Tensor, eps: float,
    memory_efficient: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The gradients of input and weight of ``rms_forward_affine``. Arguments as in ``backward_affine``."""
    return _grads(
        "rms_backward_affine", dout, None, invvar, input_or_output, normalized_shape, {"weight": weight}, eps,
        memory_efficient, centers=False,
    )[:2]  # fmt: skip
