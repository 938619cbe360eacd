"""Collectives that name their call when they fail, for ``process_group=`` and ``amp.check_ranks``."""

from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ampctx._errors import AmpError, AmpRankError, AmpTypeError, AmpValueError


def is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def is_rank_zero() -> bool:
    return not is_distributed() or torch.distributed.get_rank() == 0


def check_process_group(process_group: Any, name: str = "process_group") -> None:
    """Accepts None and a group that includes this rank. Raises AmpTypeError, AmpValueError or AmpError otherwise, by
    the name of the argument."""
    if process_group is None:
        return
    dist = torch.distributed
    if not dist.is_available():
        raise AmpError(f"{name} was given, and this torch was built without torch.distributed. Leave it out.")
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise AmpValueError(
            f"{name} does not contain this rank. dist.new_group returns such a value on ranks outside of the "
            "group. Pass the group that this rank shares its scale with, or None."
        )
    if not isinstance(process_group, dist.ProcessGroup):
        raise AmpTypeError(
            f"{name} must be a torch.distributed.ProcessGroup, got {type(process_group).__name__}. "
            "Pass dist.new_group(ranks), mesh.get_group(dim) or, after dist.init_process_group, dist.group.WORLD."
        )


# What ``ranks_of`` says, by group. torch lists all ranks at each question, and none once the group is destroyed.
_RANKS: MutableMapping[Any, str] = WeakKeyDictionary()


def ranks_of(group: Any) -> str:
    """This rank and those of a group, for messages."""
    if group not in _RANKS:
        dist = torch.distributed
        ranks = dist.get_process_group_ranks(group)
        shown = ", ".join(map(str, ranks if len(ranks) <= 16 else [*ranks[:15], "..."]))
        _RANKS[group] = f"rank {dist.get_rank()} of a group of {len(ranks)} ranks [{shown}]"
    return _RANKS[group]


def device_for(backends: str, device: torch.device, bound: torch.device | None = None) -> torch.device:
    """``device`` if a group with these backends, such as "cpu:gloo,cuda:nccl", takes its tensors. Otherwise ``bound``,
    the device that the group was made for, or else the current device of the first type that it takes."""
    kinds = [backend.partition(":")[0] for backend in backends.split(",")]
    return device if device.type in kinds else bound or torch.device(kinds[0])


@contextmanager
def named_collective(call: str, group: Any, has: str) -> Iterator[None]:
    """Raises AmpRankError in place of torch's error. ``has``: what this rank takes into the collective."""
    ranks = ranks_of(group)
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError, NotImplementedError):
        raise  # of this rank alone
    except RuntimeError as error:
        first_line = str(error).partition("\n")[0]
        raise AmpRankError(
            f"{call}: a collective failed on {ranks}, which has {has}. Another rank has ended, raised an "
            "error, or left this call out. Look for its error first. Then end the run on every rank, and resume it "
            f"from a checkpoint. See `ampctx explain differ-between-ranks`. torch says: {first_line}"
        ) from error


def all_reduce(t: Tensor, op: Any, group: Any, call: str, has: str) -> None:
    """Reduces ``t`` in place over a group, on the device of the group if its backend does not take that of ``t``. Every
    rank must take part.

    No host sync on CUDA with NCCL: the current stream waits. With a host backend (gloo) the host waits for the others.

    Raises:
        AmpRankError: the collective failed, by the name of the call.
    """
    sent = t
    if not t.is_cpu or torch.accelerator.is_available():
        backends, bound = torch.distributed.get_backend_config(group), getattr(group, "bound_device_id", None)
        sent = t.to(device_for(backends, t.device, bound))
    with named_collective(call, group, has):
        torch.distributed.all_reduce(sent, op=op, group=group)
    if sent is not t:
        t.copy_(sent)


def reduced_over(t: Tensor, op: Any, groups: Iterable[Any], call: str, has: str) -> Tensor:
    """``t``, reduced in place over one group after the other, with an ``all_reduce`` for each."""
    for group in groups:
        all_reduce(t, op, group, call, has)
    return t


def maximum_over_ranks(t: Tensor, groups: Iterable[Any], call: str, has: str) -> Tensor:
    """The maximum over the ranks of all groups, element by element, as a new tensor."""
    return reduced_over(t.detach().clone(), torch.distributed.ReduceOp.MAX, groups, call, has)
