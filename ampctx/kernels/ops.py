"""The ops of ``torch.ops.ampctx``: docstring and typed call of each.

An op takes lists of tensors on one device. A list has one dtype (fp32, fp16 or bf16, and fp64 on the CPU). Tensors at
one index have equally many elements and the same memory layout (contiguous, or any dense layout that all share).
Tensors and lists may be empty. Anything else, such as a tensor whose storage was freed, raises a RuntimeError that
names list and index, and changes nothing. ``ampctx.foreach`` has the same arithmetic for mixed lists. One tensor may
stand at the same index of two lists; any other overlap of memory gives undefined results. No op waits for the device.

``found_inf`` is a one-element fp32 or int32 tensor on the device of the lists. An op writes 1 into it when it finds inf
or nan in its input, and never clears it. Factors are floats or one-element tensors, on the device of the lists (fp32)
or on the CPU. Arithmetic is fp32 (fp64 if any tensor is), rounded on the store as torch's ``copy_`` rounds.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampctx._plan import PLANS
from ampctx.kernels.definitions import NAMESPACE, define
from ampctx.kernels.extension import Extension, load
from ampctx.kernels.reference import Tensors
from ampctx.kernels.tensor_loops import increment_version

_library = define(NAMESPACE, lambda: extension)
extension: Extension = load(NAMESPACE, define)
_ops = torch.ops.ampctx
# A factor: a number, or a tensor of one element.
Scalar = float | Tensor


def is_watched() -> bool:
    """Whether torch.compile or a TorchDispatchMode must see each op call."""
    # Private; torch has no public test for a TorchDispatchMode.
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def factor(value: Scalar) -> Tensor:
    """A factor as the ops take it: tensors unchanged, numbers as fp64 on the CPU. Do not write to the result."""
    if isinstance(value, Tensor):
        return value
    # 0.0 and -0.0 are one key.
    return _number(float(value)) if value == 0 or is_watched() else _kept_number(float(value))


def _number(value: float) -> Tensor:
    return torch.full((), value, dtype=torch.float64, device="cpu")


_kept_number = lru_cache(maxsize=64)(_number)


class OpCall(NamedTuple):
    """One call of an op: its name, its lists, and its other arguments."""

    op: str
    lists: Sequence[Sequence[Tensor]]
    others: tuple[Any, ...]


class _Calls(threading.local):
    """The calls that are being noted in this thread."""

    noted: list[OpCall] | None = None


_calls = _Calls()


@contextmanager
def noted() -> Iterator[list[OpCall]]:
    """Notes the calls of ops in this thread, for plans."""
    if not PLANS or extension.reader is None or torch.compiler.is_compiling():  # no plan is made there
        yield []
        return
    former, _calls.noted = _calls.noted, []
    try:
        yield _calls.noted
    finally:
        _calls.noted = former


def are_uniform(lists: tuple[Sequence[Tensor], ...]) -> bool:
    """Whether they are plain contiguous tensors, of one device and for each list of one dtype, and agree in size. False
    where that is not known."""
    if extension.reader is None or is_watched() or not lists[0]:
        return False
    kind = lists[0][0].device.type
    is_served = kind in extension.backends and (extension.late is None or extension.serves(kind))
    return is_served and bool(extension.reader.are_uniform(lists))


def call(name: str, lists: tuple[Sequence[Tensor], ...], *others: Any) -> Any:
    """Calls an op of ``torch.ops.ampctx``."""
    if not torch.compiler.is_compiling() and _calls.noted is not None:
        _calls.noted.append(OpCall(name, lists, others))
    try:
        return getattr(_ops, name).default(*lists, *others)
    except RuntimeError as error:
        raise_out_of_memory(error)
        raise


def raise_out_of_memory(error: RuntimeError) -> None:
    """Raises torch.OutOfMemoryError for a kernel's own error (csrc/error.h): C++ without torch's headers cannot."""
    if str(error).startswith("ampctx: out of memory: "):
        raise torch.OutOfMemoryError(str(error)) from None


def wrote(*lists: Sequence[Tensor]) -> None:
    """Tells autograd that the tensors changed, which a C++ op outside autograd does not do by itself."""
    if not torch.compiler.is_compiling():
        for tensors in lists:
            if tensors:
                increment_version(list(tensors))


class ScaleUpdate(NamedTuple):
    """The arguments of ``update_scale`` but its flag, for a call that checks gradients and then updates the scale by
    its own flag."""

    scale: Tensor
    growth_tracker: Tensor
    hysteresis_tracker: Tensor
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    hysteresis: int
    min_scale: float
    max_scale: float


def multi_tensor_scale(
    src: Tensors, dst: Tensors, found_inf: Tensor, scale: Scalar, update: ScaleUpdate | None = None
) -> None:
    """Computes ``dst[i] = src[i] * scale``, and sets ``found_inf`` if an element of ``src`` is inf or nan.

    Inf and nan are copied. A finite value that overflows the dtype of ``dst`` does not set ``found_inf``. No host sync.

    Args:
        src, dst: lists of tensors, fp32, fp16 or bf16 (fp64 on the CPU). ``dst`` may be ``src``.
        found_inf: one element, fp32 or int32, on the device of the lists.
        scale: a number or a one-element tensor, fp32 on the device of the lists or on the CPU.
        update: what ``update_scale`` does with ``found_inf`` afterwards, in the same launch. None by default.
    """
    if update is None:
        call("multi_tensor_scale", (src, dst), found_inf, factor(scale))
    else:
        call("multi_tensor_scale_and_update", (src, dst), found_inf, factor(scale), *update)
        wrote(update[:3])
    wrote(dst)


def multi_tensor_scale_clipped(
    src: Tensors, dst: Tensors, found_inf: Tensor, scale: Scalar, grad_norm: Scalar, max_norm: float
) -> None:
    """``multi_tensor_scale`` by ``scale * min(max_norm / (grad_norm + 1e-6), 1)``. The launch forms that factor in
    fp32, as torch's clip does. A negative ``max_norm`` clips nothing. No host sync.

    ``grad_norm`` is that of ``src``: on the CPU, a factor of 1 in place with a raised ``found_inf`` reads nothing."""
    op = "multi_tensor_scale_clipped"
    call(op, (src, dst), found_inf, factor(scale), factor(grad_norm), max_norm)
    wrote(dst)


def multi_tensor_axpby(
    x: Tensors, y: Tensors, out: Tensors, found_inf: Tensor, a: Scalar, b: Scalar, arg_to_check: int = -1
) -> None:
    """Computes ``out[i] = a * x[i] + b * y[i]``, and sets ``found_inf`` if a checked input has inf or nan.

    No host sync.

    Args:
        x, y, out: lists of tensors, fp32, fp16 or bf16 (fp64 on the CPU). ``out`` may be ``x`` or ``y``.
        found_inf: one element, fp32 or int32, on the device of the lists.
        a, b: numbers or one-element tensors, fp32 on the device of the lists or on the CPU.
        arg_to_check: check ``x`` (0), ``y`` (1) or both (-1).
    """
    call("multi_tensor_axpby", (x, y, out), found_inf, factor(a), factor(b), arg_to_check)
    wrote(out)


def multi_tensor_l2norm(tensors: Tensors, found_inf: Tensor, per_tensor: bool = False) -> tuple[Tensor, Tensor]:
    """Computes the L2 norm of all tensors together and, with ``per_tensor``, of each.

    Only an inf or nan element sets ``found_inf``. A sum of squares beyond the fp32 range gives an infinite norm without
    the flag. The order of summation is fixed, so two calls agree to the last bit. No host sync.

    Returns:
        The total norm, 0-d, and one norm per tensor (none without ``per_tensor``). Both are fp32 (fp64 for fp64 input).
    """
    return call("multi_tensor_l2norm", (tensors,), found_inf, per_tensor)


def multi_tensor_unscale_l2norm(
    tensors: Tensors, found_inf: Tensor, inv_scale: Scalar, per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """Computes ``multi_tensor_l2norm`` of ``t * inv_scale`` in one read. Does not change the tensors. No host sync."""
    return call("multi_tensor_unscale_l2norm", (tensors,), found_inf, factor(inv_scale), per_tensor)


def unscale_l2norm_and_update(
    tensors: Tensors, found_inf: Tensor, inv_scale: Scalar, per_tensor: bool, update: ScaleUpdate
) -> tuple[Tensor, Tensor, Tensor]:
    """``multi_tensor_unscale_l2norm`` with an update of the scale, as in ``multi_tensor_scale``, and its total norm
    again, in memory of its own. No host sync."""
    op = "multi_tensor_unscale_l2norm_and_update"
    norms = call(op, (tensors,), found_inf, factor(inv_scale), per_tensor, *update)
    wrote(update[:3])
    return norms


def update_scale(
    scale: Tensor,
    growth_tracker: Tensor,
    hysteresis_tracker: Tensor,
    found_inf: Tensor,
    *,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    hysteresis: int = 1,
    min_scale: float = 0.0,
    max_scale: float = float("inf"),
) -> None:
    """Updates the loss scale in place, on one-element tensors of one device: fp32 ``scale``, int32 trackers.

    If ``found_inf`` is not 0, the growth tracker restarts and the hysteresis tracker falls by one. Once that is 0, the
    scale becomes ``max(scale * backoff_factor, min_scale)``. Otherwise the hysteresis tracker is refilled, and after
    ``growth_interval`` clean updates in a row the scale becomes ``min(scale * growth_factor, max_scale)``.

    The scale stays between the smallest normal fp32 and the largest fp32. ``hysteresis=1`` is torch.amp's rule; higher
    values follow Megatron's and apex's update_scale_hysteresis. No host sync.

    Raises:
        RuntimeError: ``growth_factor`` < 1, ``backoff_factor`` outside (0, 1], a bound that is nan or beyond fp32, or
            ``hysteresis`` beyond int32.
    """
    state = (scale, growth_tracker, hysteresis_tracker)
    rule = (growth_factor, backoff_factor, growth_interval, hysteresis, min_scale, max_scale)
    call("update_scale", (), *state, found_inf, *rule)
    wrote(state)


def block_factors(scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Makes what a ``scale_loss`` block takes of an fp32 ``scale`` of one element, in one launch. No host sync.

    Returns:
        A copy of the scale, 1 / scale, and a flag of 0: three new 0-d fp32 tensors, which later updates of the scale do
        not change.
    """
    return call("block_factors", (), scale)


def count_skip(counts: Tensor, found_inf: Tensor, flag: Tensor, scale: Tensor, slot: int, is_first: bool) -> None:
    """Counts a step that the device may skip, in ``counts``: fp32, contiguous, 2 elements and 2 for each slot.

    With ``is_first`` ``counts[0]`` counts steps whose ``found_inf`` is set, and ``counts[1]`` those in a row. For the
    loss of the slot, ``counts[2 + 2 * slot]`` counts steps whose ``flag`` is set, and the next element is the scale.
    Takes tensors of one device. No host sync.
    """
    call("count_skip", (), counts, found_inf, flag, scale, slot, is_first)
