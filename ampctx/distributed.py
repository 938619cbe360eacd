"""For training on several ranks: hooks for DistributedDataParallel, and FSDP2 at O2 and O5.

``average_hook`` and ``lossy`` are for ``register_comm_hook``, ``fully_shard`` and ``mixed_precision_policy`` for FSDP2.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ampctx._errors import AmpTypeError, AmpValueError
from ampctx.amp.fully_sharded import fully_shard, mixed_precision_policy

__all__ = ["average_hook", "fully_shard", "lossy", "mixed_precision_policy"]


def average_hook(predivide: float | None = None, dtype: torch.dtype | None = None) -> Callable[[Any, Any], Any]:
    """Makes a DistributedDataParallel hook that averages gradients with a chosen division and dtype. No host sync.

    The hook divides gradients by ``predivide``, sums them over the ranks, and multiplies by ``predivide / ranks``.

    Example::

        ddp.register_comm_hook(None, average_hook(dtype=torch.float32))  # None: the default process group

    Args:
        predivide: a number > 0. None, the default: the number of ranks, as in torch without a hook. Then a sum of
            finite gradients cannot overflow. Smaller numbers keep more of tiny 16-bit gradients; 1 divides only after
            the sum.
        dtype: a floating dtype for division and sum. torch.float32 avoids overflow and underflow of 16-bit gradients,
            for twice the traffic. None, the default: the dtype of the gradients.

    Returns:
        The hook, ``hook(process_group, bucket) -> Future[Tensor]``.

    Raises:
        AmpTypeError, AmpValueError: an invalid argument, by name.
    """
    if predivide is not None:
        if isinstance(predivide, bool) or not isinstance(predivide, (int, float)):
            raise AmpTypeError(f"predivide must be a number or None, got {type(predivide).__name__}")
        if not 0.0 < predivide < math.inf:
            raise AmpValueError(f"predivide is {predivide}, expected a finite number > 0")
    if dtype is not None:
        if not isinstance(dtype, torch.dtype):
            raise AmpTypeError(f"dtype must be a torch.dtype or None, got {type(dtype).__name__}")
        if not dtype.is_floating_point:
            raise AmpValueError(f"dtype is {dtype}, expected a floating type")

    # No annotations: torch compares the annotations of a hook with its own classes.
    def average(process_group, bucket):
        group = torch.distributed.group.WORLD if process_group is None else process_group
        ranks = group.size()
        before = float(ranks if predivide is None else predivide)
        gradients = bucket.buffer()
        # Complex gradients keep their dtype: a real one cannot hold them.
        summed = gradients if dtype is None or gradients.is_complex() else gradients.to(dtype)
        summed.div_(before)
        future = torch.distributed.all_reduce(summed, group=group, async_op=True).get_future()

        def finish(done):
            total = done.value()[0].mul_(before / ranks) if before != ranks else done.value()[0]
            return total if total.dtype == gradients.dtype else gradients.copy_(total)

        return future.then(finish)

    return average


def lossy(state: Any, hook: Callable[[Any, Any], Any], optimizer: Any) -> Callable[[Any, Any], Any]:
    """Wraps a DistributedDataParallel hook that compresses gradients and keeps their error, such as PowerSGD.

    The hook gets unscaled gradients in fp32 (fp64 and complex ones keep their dtype), so that its errors do not depend
    on the loss scale. After an overflow the memory of ``state`` starts anew; else one overflow would skip all later
    steps. Where amp does not scale (``enabled=False``, a static scale of 1), the hook gets gradients as they are; also
    those that a GradScaler has scaled.

    Example::

        state = PowerSGDState(process_group=None)
        ddp.register_comm_hook(None, lossy(state, powerSGD_hook, optimizer))

    Args:
        state: the first argument of the hook. Its dicts ``error_dict``, ``p_memory_dict`` and ``q_memory_dict``, those
            that it has, are its memory.
        hook: ``hook(state, bucket) -> Future``, such as torch's ``powerSGD_hook``.
        optimizer: an optimizer under amp that the block of the backward names.

    Returns:
        The hook to register. Host sync: one in each backward, which reads whether the one before overflowed.

    Raises:
        AmpTypeError: ``hook`` is not callable, or ``optimizer`` has no ``step``.
    """
    if not callable(hook):
        raise AmpTypeError(f"hook must be callable with (state, bucket), got {type(hook).__name__}")
    if not callable(getattr(optimizer, "step", None)):
        raise AmpTypeError(f"optimizer must be an optimizer, got {type(optimizer).__name__}")
    # Of the buckets since the memory was last looked at.
    overflowed: list[Tensor] = []

    # No annotations, as in average_hook.
    def compress(_, bucket):
        gradients = bucket.buffer()
        # All ranks see the same sums, and start anew together: they must draw the same numbers.
        if bucket.index() == 0 and overflowed:
            flags = torch.stack([flag.to(gradients.device) for flag in overflowed])
            overflowed.clear()
            if flags.any().item():
                for name in ("error_dict", "p_memory_dict", "q_memory_dict"):
                    getattr(state, name, {}).clear()
        factors_on = getattr(optimizer.step, "factors_on", None)
        factors = None if factors_on is None else factors_on(gradients.device)
        if factors is None:
            return hook(state, bucket)
        scale, inv_scale = factors
        # In 16 bits small gradients would become 0.
        bucket.set_buffer(gradients.to(torch.promote_types(gradients.dtype, torch.float32)) * inv_scale)

        def finish(done):
            total = done.value()
            total = total[0] if isinstance(total, (list, tuple)) else total
            gradients.copy_(total.mul_(scale))
            overflowed.append(~torch.isfinite(gradients).all())
            return gradients

        return hook(state, bucket).then(finish)

    return compress
