"""apex's calling form of the ops: ``multi_tensor_applier(op, noop_flag, [list, list], *args)``.

Pass the functions of this module as ``op``. They share these arguments and errors.

Args:
    chunk_size: ignored; it tuned apex's kernels.
    noop_flag: an int32 or fp32 tensor of one or more elements. Its first element becomes 1 if an input holds inf or
        nan. It may be on another device than the lists; if one of the two is the CPU, that is a host sync.
    tensor_lists: lists of fp32, fp16, bf16 and fp64 tensors on one device, in any mix of dtypes and layouts, or empty.
        Tensors at one index have the same number of elements. Elements correspond by index if the shapes are equal,
        else in row-major order.
    factors: numbers, or one-element tensors, which the host does not read.

Raises:
    AmpTypeError, AmpValueError: an invalid flag, list or tensor, with the names of function and list, and the index.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ampctx._errors import AmpTypeError, AmpValueError
from ampctx.kernels import foreach
from ampctx.kernels.calling_form import Call, Number, TensorLists, foreach_factor, found_in, norms


class MultiTensorApply:
    """Calls ``op(chunk_size, noop_flag_buffer, tensor_lists, *args)``.

    Raises:
        AmpTypeError, AmpValueError: ``chunk_size`` is no int > 0.
    """

    # Code with a slow path for a missing extension reads this. Our ops always work.
    available = True
    # apex's other attributes about a missing extension: whether it has warned, and the ImportError.
    warned = False
    import_err: ImportError | None = None

    def __init__(self, chunk_size: int) -> None:
        if isinstance(chunk_size, bool) or not isinstance(chunk_size, int):
            raise AmpTypeError(f"chunk_size must be an int, got {type(chunk_size).__name__}")
        if chunk_size <= 0:
            raise AmpValueError(f"chunk_size is {chunk_size}, expected an int > 0")
        self.chunk_size = chunk_size

    def check_avail(self) -> None:
        """Does nothing. apex raises here if its extension is missing."""

    def __call__(self, op: Callable[..., Any], noop_flag_buffer: Tensor, tensor_lists: TensorLists, *args: Any) -> Any:
        """Calls ``op`` and returns its result."""
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)


@torch.no_grad()
def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, scale: Number) -> None:
    """``dst[i] = src[i] * scale`` for ``tensor_lists = [src, dst]``; ``dst`` may be ``src``. The flag checks ``src``.

    No host sync.
    """
    call = Call("multi_tensor_scale", noop_flag, tensor_lists, ("src", "dst"))
    factor = foreach_factor(call.factor("scale", scale))
    with call.flag() as flag:
        foreach.scale(call["src"], call["dst"], found_in(flag), factor)


@torch.no_grad()
def multi_tensor_axpby(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    a: Number,
    b: Number,
    arg_to_check: int,
) -> None:
    """``out[i] = a * x[i] + b * y[i]`` for ``tensor_lists = [x, y, out]``. The flag checks x (0), y (1) or both (-1).

    ``out`` may be ``x`` or ``y``. No host sync.
    """
    call = Call("multi_tensor_axpby", noop_flag, tensor_lists, ("x", "y", "out"))
    arg_to_check = call.one_of("arg_to_check", arg_to_check, (-1, 0, 1))
    of_x, of_y = foreach_factor(call.factor("a", a)), foreach_factor(call.factor("b", b))
    with call.flag() as flag:
        foreach.axpby(call["x"], call["y"], call["out"], found_in(flag), of_x, of_y, arg_to_check)


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, per_tensor: bool | None = False
) -> tuple[Tensor, Tensor]:
    """``(total norm [1], norms of each tensor [n] or empty [0])`` for ``tensor_lists = [tensors]``. No host sync.

    Both are fp32, or fp64 for fp64 tensors. The flag reports inf and nan elements, not an overflow of the sum of
    squares.
    """
    return norms("multi_tensor_l2norm", noop_flag, tensor_lists, 1.0, per_tensor)


def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    inv_scale: Number,
    per_tensor: bool | None = False,
) -> tuple[Tensor, Tensor]:
    """``multi_tensor_l2norm`` of ``t * inv_scale``, without changing the tensors. No host sync."""
    return norms("multi_tensor_unscale_l2norm", noop_flag, tensor_lists, inv_scale, per_tensor)
