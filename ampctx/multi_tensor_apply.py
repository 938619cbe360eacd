"""apex's calling form of the ops: ``multi_tensor_applier(op, noop_flag, [list, list], *args)``.

The functions here go in as ``op``. ``chunk_size`` steered apex's kernels; it is taken and has no effect on any result.
``noop_flag``, a one-element int32 or fp32 tensor on the device of the lists, becomes 1 when an input holds inf or nan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ampctx import ops
from ampctx._errors import AmpTypeError, AmpValueError

TensorLists = Sequence[Sequence[Tensor]]


class MultiTensorApply:
    """Calls ``op(chunk_size, noop_flag_buffer, tensor_lists, *args)``.

    Raises:
        AmpTypeError, AmpValueError: ``chunk_size`` is no int > 0.
    """

    # Asked by code that has a slow path for a missing extension; the ops serve with and without one.
    available = True

    def __init__(self, chunk_size: int) -> None:
        if isinstance(chunk_size, bool) or not isinstance(chunk_size, int):
            raise AmpTypeError(f"chunk_size must be an int, got {type(chunk_size).__name__}")
        if chunk_size <= 0:
            raise AmpValueError(f"chunk_size is {chunk_size}, expected an int > 0")
        self.chunk_size = chunk_size

    def check_avail(self) -> None:
        """Passes: apex raised here where its extension was missing."""

    def __call__(self, op: Callable[..., Any], noop_flag_buffer: Tensor, tensor_lists: TensorLists, *args: Any) -> Any:
        """What ``op`` returns."""
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)


def _lists(op: str, tensor_lists: TensorLists, *names: str) -> TensorLists:
    if isinstance(tensor_lists, Tensor) or any(isinstance(tensors, Tensor) for tensors in tensor_lists):
        raise AmpTypeError(f"{op}: tensor_lists must be [{', '.join(names)}], each a list of tensors; got a tensor")
    if len(tensor_lists) != len(names):
        raise AmpValueError(
            f"{op}: tensor_lists has {len(tensor_lists)} lists, expected {len(names)}: {', '.join(names)}"
        )
    return tensor_lists


def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, scale: float | Tensor) -> None:
    """``dst[i] = src[i] * scale`` for ``tensor_lists = [src, dst]`` (``ops.multi_tensor_scale``). No host sync."""
    src, dst = _lists("multi_tensor_scale", tensor_lists, "src", "dst")
    ops.multi_tensor_scale(src, dst, noop_flag, scale)


def multi_tensor_axpby(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    a: float | Tensor,
    b: float | Tensor,
    arg_to_check: int,
) -> None:
    """``out[i] = a * x[i] + b * y[i]`` for ``tensor_lists = [x, y, out]``; the flag watches x (0), y (1) or both (-1).

    No host sync (``ops.multi_tensor_axpby``).
    """
    x, y, out = _lists("multi_tensor_axpby", tensor_lists, "x", "y", "out")
    ops.multi_tensor_axpby(x, y, out, noop_flag, a, b, arg_to_check)


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, per_tensor: bool | None = False
) -> tuple[Tensor, Tensor]:
    """``(norm of everything [1], norms of each [n] or empty [0])`` for ``tensor_lists = [tensors]``. No host sync."""
    (tensors,) = _lists("multi_tensor_l2norm", tensor_lists, "tensors")
    total, each = ops.multi_tensor_l2norm(tensors, noop_flag, bool(per_tensor))
    return total.reshape(1), each


def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    inv_scale: float | Tensor,
    per_tensor: bool | None = False,
) -> tuple[Tensor, Tensor]:
    """``multi_tensor_l2norm`` of ``t * inv_scale``; the tensors are left as they are. No host sync."""
    (tensors,) = _lists("multi_tensor_unscale_l2norm", tensor_lists, "tensors")
    total, each = ops.multi_tensor_unscale_l2norm(tensors, noop_flag, inv_scale, bool(per_tensor))
    return total.reshape(1), each
