"""The functions of fused_layer_norm_cuda on torch's ops: layer norm and RMS norm, with their gradients.

Signatures are apex's. They compute in fp32, or fp64 where a tensor has it. Statistics have one element for each row,
fp32 or fp64. Any strides are allowed. Errors name the argument. No host sync.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

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
    op: str,
    parameters: Mapping[str, Tensor],
    centers: bool,
    of_weight: bool,
    *,
    input: Tensor,
    normalized_shape: Shape,
    eps: float,
) -> tuple[Tensor, ...]:
    """The output, of the type of ``weight`` or of ``input``, the mean where it ``centers``, the inverse deviation."""
    rows = _rows(op, "input", input, normalized_shape, parameters)
    weight, bias = parameters.get("weight"), parameters.get("bias")
    with without_autocast(input):
        x = rows.of(input)
        kept = torch.promote_types(input.dtype, torch.float32)
        statistics = []
        if centers:
            mean = x.mean(1, keepdim=True)
            x = x - mean
            statistics.append(mean.flatten().to(kept))
        invvar = (x.square().mean(1, keepdim=True) + eps).rsqrt()
        x = x * invvar
        if weight is not None:
            x = x * rows.parameter(weight)
        if bias is not None:
            x = x + rows.parameter(bias)
        dtype = weight.dtype if of_weight and weight is not None else input.dtype
        return x.to(dtype).reshape(input.shape), *statistics, invvar.flatten().to(kept)


def _grads(
    op: str,
    parameters: Mapping[str, Tensor],
    centers: bool,
    *,
    dout: Tensor,
    mean: Tensor | None = None,
    invvar: Tensor,
    input_or_output: Tensor,
    normalized_shape: Shape,
    eps: float,
    memory_efficient: bool,
) -> Any:
    """The gradients of the input and the parameters; a tensor without the latter."""
    rows = _rows(op, "input_or_output", input_or_output, normalized_shape, parameters)
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


def _function(op: str, arguments: str, parameters: str, doc: str, body: Callable[..., Any]) -> Callable[..., Any]:
    """``body`` as a function of ``arguments``, ``parameters`` among them."""
    kind, names = inspect.Parameter.POSITIONAL_OR_KEYWORD, parameters.split()
    signature = inspect.Signature(
        [
            inspect.Parameter(name, kind, default=False if name == "memory_efficient" else inspect.Parameter.empty)
            for name in arguments.format(parameters).split()
        ]
    )

    def function(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        of_name = {name: given.arguments.pop(name) for name in names}
        return body(op, of_name, **given.arguments)

    vars(function)["__signature__"] = signature
    function.__name__ = function.__qualname__ = op
    function.__doc__ = doc
    return torch.no_grad()(function)


def _forward(op: str, parameters: str = "", of_weight: bool = False) -> Callable[..., Any]:
    centers, kind = not op.startswith("rms"), "weight" if of_weight else "input"
    doc = f"""The norm over the last ``len(normalized_shape)`` dimensions of ``input``.

    Returns:
        The output, of the type of ``{kind}``; {"mean and " * centers}1 / deviation of each row, [rows], fp32 (fp64 for
        fp64 input).
    """
    body = functools.partial(_normed, centers=centers, of_weight=of_weight)
    return _function(op, "input normalized_shape {} eps", parameters, doc, body)


def _backward(op: str, parameters: str = "") -> Callable[..., Any]:
    centers = not op.startswith("rms")
    doc = """The gradients of the input and the parameters of the forward functions.

    Args:
        mean, invvar: what the forward function returned. ``mean`` may be None with ``memory_efficient``.
        input_or_output: the input; with ``memory_efficient`` the output. A weight nearer to 0 than ``eps`` then counts
            as ``eps``.
    """
    statistics = "mean invvar" if centers else "invvar"
    arguments = f"dout {statistics} input_or_output normalized_shape {{}} eps memory_efficient"
    return _function(op, arguments, parameters, doc, functools.partial(_grads, centers=centers))


forward = _forward("forward")
forward_affine = _forward("forward_affine", "weight bias")
forward_affine_mixed_dtypes = _forward("forward_affine_mixed_dtypes", "weight bias", of_weight=True)
backward = _backward("backward")
backward_affine = _backward("backward_affine", "weight bias")
rms_forward = _forward("rms_forward")
rms_forward_affine = _forward("rms_forward_affine", "weight")
rms_forward_affine_mixed_dtypes = _forward("rms_forward_affine_mixed_dtypes", "weight", of_weight=True)
rms_backward = _backward("rms_backward")
rms_backward_affine = _backward("rms_backward_affine", "weight")

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
