"""Lets the ranks of a process group agree on overflows, and average gradients without overflow.

``average_hook`` is for DistributedDataParallel's ``register_comm_hook``. The rest implements ``process_group=`` of
``amp.initialize`` and ``GradScaler``.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ampctx._errors import AmpError, AmpTypeError, AmpValueError

__all__ = ["average_hook"]


def is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def check_process_group(process_group: Any) -> None:
    """Accepts None and a group that includes this rank. Raises AmpTypeError, AmpValueError or AmpError otherwise."""
    if process_group is None:
        return
    dist = torch.distributed
    if not dist.is_available():
        raise AmpError("process_group was given, and this torch was built without torch.distributed. Leave it out.")
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise AmpValueError(
            "process_group does not contain this rank. dist.new_group returns such a value on ranks outside of the "
            "group. Pass the group that this rank shares its scale with, or None."
        )
    if not isinstance(process_group, dist.ProcessGroup):
        raise AmpTypeError(
            f"process_group must be a torch.distributed.ProcessGroup, got {type(process_group).__name__}. "
            "Pass dist.new_group(ranks), mesh.get_group(dim) or, after dist.init_process_group, dist.group.WORLD."
        )


def maximum_over_ranks(flag: Tensor, groups: Iterable[Any]) -> Tensor:
    """The maximum of a flag over the ranks of all groups, as a new tensor. One all_reduce for each group; every rank
    must take part.

    No host sync on CUDA with NCCL: the current stream waits. With a host backend (gloo) the host waits for the others.
    """
    joined = flag.detach().clone()
    for group in groups:
        torch.distributed.all_reduce(joined, op=torch.distributed.ReduceOp.MAX, group=group)
    return joined


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
