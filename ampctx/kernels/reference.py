"""Every op in a few lines of plain torch: the fallback where no kernel runs, and the oracle of the tests.

The functions take any device, dtype and layout, check nothing (``fallbacks`` does), and never wait for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# Bound here, because a user may register casts for torch.div.
_divide = torch.div
Tensors = Sequence[Tensor]
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """The dtype of arithmetic: fp64 if any tensor is fp64, else fp32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def widest(device: torch.device) -> torch.dtype:
    """fp64 on the CPU and on CUDA; fp32 elsewhere, because MPS and some XPUs lack fp64."""
    return torch.float64 if device.type in ("cpu", "cuda") else torch.float32


def is_dense(t: Tensor) -> bool:
    """Whether the elements of a strided tensor fill one block of memory without holes or overlap."""
    expected = 1
    for stride, size in sorted((st, sz) for sz, st in zip(t.shape, t.stride(), strict=True) if sz > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def same_layout(a: Tensor, b: Tensor) -> bool:
    """Whether ``a`` and ``b`` have the same elements in the same order in memory."""
    if a.is_contiguous() and b.is_contiguous():
        return a.numel() == b.numel()
    if a.shape != b.shape or not is_dense(a):
        return False
    return all(sa == sb for sa, sb, n in zip(a.stride(), b.stride(), a.shape, strict=True) if n > 1)


def has_memory(t: Tensor) -> bool:
    """Whether a dense tensor lies within its storage. FSDP frees the storage of a parameter between uses."""
    return (t.storage_offset() + t.numel()) * t.element_size() <= t.untyped_storage().nbytes()


def raise_flag(found_inf: Tensor, *tensors: Tensor) -> None:
    """Sets ``found_inf`` (one element) to 1 if a tensor holds inf or nan; never clears it."""
    for t in tensors:
        bad = (~torch.isfinite(t)).any().to(device=found_inf.device, dtype=found_inf.dtype)
        found_inf.copy_(torch.where(bad != 0, torch.ones_like(found_inf), found_inf))


def scalar(value: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    """A one-element tensor as a 0-d one of ``dtype`` on the device of ``like``. No host sync."""
    # Cast before moving: numbers are fp64 on the CPU, and the device may not support fp64.
    value = value.reshape(()).to(dtype)
    if value.device == like.device or value.device.type != "cpu" or torch.compiler.is_compiling():
        return value.to(like.device)
    return torch.full((), value.item(), dtype=dtype, device=like.device)  # a copy would wait for the device


def overwrite(t: Tensor, new: Tensor) -> None:
    """``t.copy_(new)`` that also works for expanded tensors, whose elements share memory."""
    places = tuple(slice(None) if stride else slice(1) for stride in t.stride())
    t[places].copy_(new[places])


def multi_tensor_scale(src: Tensors, dst: Tensors, found_inf: Tensor, scale: Tensor) -> None:
    """dst = src * scale."""
    for s, d in zip(src, dst, strict=True):
        raise_flag(found_inf, s)
        if s is d and not torch.compiler.is_compiling() and s._is_zerotensor():
            continue  # torch refuses to write it
        dtype = s.dtype if s.is_complex() else compute_dtype(s, d)
        d.copy_((s.to(dtype) * scalar(scale, s, dtype)).reshape(d.shape))


def multi_tensor_scale_clipped(
    src: Tensors, dst: Tensors, found_inf: Tensor, scale: Tensor, grad_norm: Tensor, max_norm: float
) -> None:
    """dst = src * scale * min(max_norm / (grad_norm + 1e-6), 1)."""
    multi_tensor_scale(src, dst, found_inf, clipped(scale, grad_norm, max_norm))


def multi_tensor_axpby(
    x: Tensors, y: Tensors, out: Tensors, found_inf: Tensor, a: Tensor, b: Tensor, arg_to_check: int
) -> None:
    """out = a * x + b * y; the finite check looks at x (0), y (1) or both (-1)."""
    for s, t, o in zip(x, y, out, strict=True):
        raise_flag(found_inf, *((s,), (t,), (s, t))[arg_to_check])
        dtype = s.dtype if s.is_complex() else compute_dtype(s, t, o)
        ax, by = (scalar(f, s, dtype) * v.to(dtype).reshape(o.shape) for f, v in ((a, s), (b, t)))
        o.copy_(ax + by)


def multi_tensor_unscale_l2norm(
    tensors: Tensors, found_inf: Tensor, inv_scale: Tensor, per_tensor: bool
) -> tuple[Tensor, Tensor]:
    """sqrt(sum((t * inv_scale)**2)) over all tensors and, with ``per_tensor``, of each."""
    dtype = compute_dtype(*tensors)
    device = tensors[0].device if tensors else found_inf.device
    norms = []
    for t in tensors:
        raise_flag(found_inf, t)
        scaled = t.to(t.dtype if t.is_complex() else dtype)
        scaled = scaled * scalar(inv_scale, t, dtype)
        norms.append(torch.linalg.vector_norm(scaled).to(device=device, dtype=dtype))
    each = torch.stack(norms) if norms else torch.zeros(0, dtype=dtype, device=device)
    total = torch.linalg.vector_norm(each).reshape(())
    return total, each if per_tensor else each.new_empty(0)


def multi_tensor_l2norm(tensors: Tensors, found_inf: Tensor, per_tensor: bool) -> tuple[Tensor, Tensor]:
    """sqrt(sum(t**2)) over all tensors and, with ``per_tensor``, of each."""
    one = torch.ones((), dtype=torch.float32, device=found_inf.device)
    return multi_tensor_unscale_l2norm(tensors, found_inf, one, per_tensor)


def update_scale(
    scale: Tensor, growth_tracker: Tensor, hysteresis_tracker: Tensor, found_inf: Tensor, *rule: Any
) -> None:
    """The loss-scale rule of csrc/functors/loss_scale.h, as selects on the device. ``rule``: its numbers, in the order
    of the op."""
    growth_factor, backoff_factor, growth_interval, hysteresis, min_scale, max_scale = rule
    overflow = found_inf.reshape(()) != 0
    fewer = hysteresis_tracker.clamp(min=1) - 1
    left = torch.where(overflow, fewer, torch.full_like(hysteresis_tracker, hysteresis))
    backoff = overflow & (left.reshape(()) <= 0)
    clean_steps = torch.where(overflow, torch.zeros_like(growth_tracker), growth_tracker).long() + ~overflow
    grow = ~overflow & (clean_steps.reshape(()) >= growth_interval)

    # Products in fp64 as in torch.amp, if the device supports it.
    wide = scale.to(widest(scale.device))
    grown = (wide * growth_factor).float()
    smaller = (wide * backoff_factor).float().clamp(min=max(min_scale, torch.finfo(torch.float32).tiny))
    larger = torch.where(torch.isfinite(grown), grown, scale)
    if max_scale <= torch.finfo(torch.float32).max:
        larger = larger.clamp(max=max_scale)
    scale.copy_(torch.where(backoff, smaller, torch.where(grow, larger, scale)))
    clean_steps = clean_steps.clamp(max=torch.iinfo(torch.int32).max)
    growth_tracker.copy_(torch.where(grow, torch.zeros_like(clean_steps), clean_steps))
    hysteresis_tracker.copy_(left)


def block_factors(scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Copies of the scale and of 1 / scale, and a flag of 0."""
    copy = scale.detach().reshape(()).clone()
    # Not reciprocal: casts on the CPU handle it in Python.
    return copy, _divide(torch.full((), 1.0, dtype=torch.float32, device="cpu"), copy), torch.zeros_like(copy)


def skip_counts(counts: Tensor, slot: int) -> list[Tensor]:
    """The four numbers of csrc/functors/loss_scale.h for a loss of a step, as 0-d views."""
    return [*counts[:2].unbind(), *counts[2 + 2 * slot : 4 + 2 * slot].unbind()]


def count_skip(counts: Tensor, found_inf: Tensor, flag: Tensor, scale: Tensor, slot: int, is_first: bool) -> None:
    """The counts of csrc/functors/loss_scale.h."""
    count_skip_in(skip_counts(counts, slot), found_inf, flag, scale, is_first)


def count_skip_in(counts: Tensors, found_inf: Tensor, flag: Tensor, scale: Tensor, is_first: bool = True) -> None:
    skipped, in_a_row, overflowed, value = counts
    if is_first:
        is_skipped = found_inf.reshape(()) != 0
        skipped.add_(is_skipped)
        in_a_row.add_(1).mul_(is_skipped)
    overflowed.add_(flag.reshape(()) != 0)
    value.copy_(scale.reshape(()))


def clipped(inv_scale: Tensor, norm: Tensor, max_norm: float) -> Tensor:
    """inv_scale * min(max_norm / (norm + 1e-6), 1) in fp32, or inv_scale where max_norm is negative."""
    if max_norm < 0:
        return inv_scale
    like = norm if norm.device.type != "cpu" else inv_scale
    coefficient = (max_norm / (scalar(norm, like, torch.float32) + 1e-6)).clamp(max=1.0)
    return scalar(inv_scale, like, torch.float32) * coefficient
