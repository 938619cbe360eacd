"""fused_layer_norm_cuda: layer norm and RMS norm with their statistics, and their gradients, on torch's ops.

Signatures are apex's. The norms are over the last ``len(normalized_shape)`` dimensions. They compute in fp32, or fp64
where a tensor has it. Any strides are allowed. Errors name the argument. No gradient flows through, and no host sync.
``apex.normalization`` has the layers.

Forward functions return the output, of the type of ``input`` (of ``weight`` in those of mixed dtypes), and for each row
the mean, but for RMS norm, and 1 / deviation: [rows], fp32 (fp64 for fp64 input).

Backward functions return the gradients of the input and the parameters. ``mean`` and ``invvar`` are what the forward
function returned. With ``memory_efficient`` they take the output in place of the input, and ``mean`` may be None; a
weight nearer to 0 than ``eps`` then counts as ``eps``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from ampctx_apex.arguments import check_tensor, positional, without_autocast
from torch import Tensor

from ampctx import AmpValueError

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


def _normed(op: str, input: Tensor, normalized_shape: Shape, eps: float, **parameters: Tensor) -> tuple[Tensor, ...]:
    like = parameters["weight"] if op.endswith("mixed_dtypes") else input
    rows = _rows(op, "input", input, normalized_shape, parameters)
    with without_autocast(input):
        x = rows.of(input)
        kept = torch.promote_types(input.dtype, torch.float32)
        statistics = []
        if not op.startswith("rms"):
            mean = x.mean(1, keepdim=True)
            x = x - mean
            statistics.append(mean.flatten().to(kept))
        invvar = (x.square().mean(1, keepdim=True) + eps).rsqrt()
        x = x * invvar
        for name, t in parameters.items():
            x = x * rows.parameter(t) if name == "weight" else x + rows.parameter(t)
        return x.to(like.dtype).reshape(input.shape), *statistics, invvar.flatten().to(kept)


def _grads(
    op: str,
    dout: Tensor,
    invvar: Tensor,
    input_or_output: Tensor,
    normalized_shape: Shape,
    eps: float,
    memory_efficient: bool,
    mean: Tensor | None = None,
    **parameters: Tensor,
) -> Any:
    rows = _rows(op, "input_or_output", input_or_output, normalized_shape, parameters)
    weight, bias, centers = parameters.get("weight"), parameters.get("bias"), not op.startswith("rms")
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
            if mean is not None:
                normed = normed - rows.statistic(mean)
            normed = normed * rows.statistic(invvar)
        g = dy if scale is None else dy * scale
        dx = g - normed * (g * normed).mean(1, keepdim=True)
        if centers:
            dx = dx - g.mean(1, keepdim=True)
        dx = (dx * rows.statistic(invvar)).to(input_or_output.dtype).reshape(input_or_output.shape)
        of_parameters = [
            (dy * normed if name == "weight" else dy).sum(0).to(t.dtype).reshape(rows.shape)
            for name, t in parameters.items()
        ]
        return (dx, *of_parameters) if parameters else dx


def _function(op: str, parameters: str = "") -> Callable[..., Any]:
    statistics = "invvar" if op.startswith("rms") else "mean invvar"
    arguments = f"dout {statistics} input_or_output normalized_shape {parameters} eps memory_efficient=False"
    if is_forward := "forward" in op:
        arguments = f"input normalized_shape {parameters} eps"
    found = positional(op, arguments, functools.partial(_normed if is_forward else _grads, op))
    found.__module__ = __name__  # where pickle looks for it
    return found


forward = _function("forward")
forward_affine = _function("forward_affine", "weight bias")
forward_affine_mixed_dtypes = _function("forward_affine_mixed_dtypes", "weight bias")
backward = _function("backward")
backward_affine = _function("backward_affine", "weight bias")
rms_forward = _function("rms_forward")
rms_forward_affine = _function("rms_forward_affine", "weight")
rms_forward_affine_mixed_dtypes = _function("rms_forward_affine_mixed_dtypes", "weight")
rms_backward = _function("rms_backward")
rms_backward_affine = _function("rms_backward_affine", "weight")

__all__ = [
    "backward",
    "backward_affine",
    "forward",
    "forward_affine",
    "forward_affine_mixed_dtypes",
    "rms_backward",
    "rms_backward_affine",
    "rms_forward",
    "rms_forward_affine",
    "rms_forward_affine_mixed_dtypes",
]
