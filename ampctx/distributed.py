"""What the ranks of a process group do together: agree on overflow, and average gradients without overflow.

``average_hook`` is for DistributedDataParallel's ``register_comm_hook``. The rest is behind ``process_group=`` of
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
    """Nothing for None and for a group that this rank is in; AmpTypeError, AmpValueError or AmpError otherwise."""
    if process_group is None:
        return
    dist = torch.distributed
    if not dist.is_available():
        raise AmpError("process_group was given, and this torch was built without torch.distributed")
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise AmpValueError(
            "process_group does not contain this rank: dist.new_group gives such a value on the ranks that it leaves "
            "out. Pass the group that this rank shares its scale with, or None."
        )
    if not isinstance(process_group, dist.ProcessGroup):
        raise AmpTypeError(
            f"process_group must be a torch.distributed.ProcessGroup, got {type(process_group).__name__}. "
            "dist.new_group(ranks), mesh.get_group(dim) and, after dist.init_process_group, dist.group.WORLD are such."
        )


def maximum_over_ranks(flag: Tensor, groups: Iterable[Any]) -> Tensor:
    """The maximum of a flag over the ranks of each process group in turn, in a new tensor: an all_reduce for each, in
    which every rank has to take part.

    No host sync on CUDA with NCCL: the current stream waits. A backend on the host (gloo) waits for the other ranks.
    """
    joined = flag.detach().clone()
    for group in groups:
        torch.distributed.all_reduce(joined, op=torch.distributed.ReduceOp.MAX, group=group)
    return joined


def average_hook(predivide: float | None = None, dtype: torch.dtype | None = None) -> Callable[[Any, Any], Any]:
    """A communication hook for DistributedDataParallel that chooses where the division by the number of ranks goes.

    ``ddp.register_comm_hook(process_group, average_hook(...))``: gradients are divided by ``predivide``, summed over
    the ranks, and multiplied by ``predivide / ranks``. The process group is the one given to DistributedDataParallel,
    None for the default one.

    Args:
        predivide: > 0. None: the number of ranks, with which a sum of finite gradients cannot overflow, as in torch
            without a hook. Smaller numbers keep more of tiny 16-bit gradients; 1 divides after the sum alone.
        dtype: a floating type to divide and sum in, such as torch.float32 for 16-bit gradients: nothing overflows or
            underflows on the way, for twice the traffic. None: that of the gradients.

    Returns:
        A hook in torch's form, ``hook(process_group, bucket) -> Future[Tensor]``. No host sync.

    Raises:
        AmpTypeError, AmpValueError: an argument that cannot be used, by name.
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

    # Without annotations: torch compares those of a hook with its own classes.
    def average(process_group, bucket):
        group = torch.distributed.group.WORLD if process_group is None else process_group
        ranks = group.size()
        before = float(ranks if predivide is None else predivide)
        gradients = bucket.buffer()
        # Complex gradients keep their type: a real one does not hold them.
        summed = gradients if dtype is None or gradients.is_complex() else gradients.to(dtype)
        summed.div_(before)
        future = torch.distributed.all_reduce(summed, group=group, async_op=True).get_future()

        def finish(done):
            total = done.value()[0].mul_(before / ranks) if before != ranks else done.value()[0]
            return total if total.dtype == gradients.dtype else gradients.copy_(total)

        return future.then(finish)

    return average
