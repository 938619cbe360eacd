"""The ``found_inf`` flags of blocks that ranks have yet to join.

With DTensors a flag waits at the end of its block. The next call that must reduce over the same ranks takes it along:
``clip_grad_norm_`` in most loops, or a step by norms. At the latest the step or the next block asks for it. All of
these come in the same order on every rank, and nothing else may decide: ranks collect an optimizer that is gone at
different times.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ampctx._collectives import reduced_over
from ampctx._errors import AmpRankError
from ampctx.kernels.foreach import move


class Waiting:
    """A flag of a loss with the ``LossScale`` ``scale``.

    Args:
        owner: the session.
        flags: those of its optimizer, which this one joins once ranks have agreed on it.
        groups: the process groups to reduce over, one after the other.

    Attributes:
        moves_scale: whether the flag will update the loss scale. Not after a scale was loaded.
        failed: whether ranks could not agree on it.
        is_added: whether its optimizer's flags have it already, with the value of this rank.
    """

    def __init__(self, owner: Any, flags: Any, loss_id: int, scale: Any, found_inf: Tensor, groups: list[Any]) -> None:
        self.owner, self._flags, self._loss_id = weakref.ref(owner), weakref.ref(flags), loss_id
        self._scale, self.found_inf = scale, found_inf
        self.groups, self.moves_scale, self.failed, self.is_added = groups, True, False, False
        ALL.append(self)

    def sent(self) -> Tensor:
        """The fp64 vector to sum up over the ranks, on the device of the flag."""
        return self._scale.sent(self.found_inf)

    def receive(self, joined: Tensor, call: str) -> None:
        """Takes the sum. ``call``: for messages."""
        self._agree(lambda: self._scale.received(joined, self.groups, call))

    def decide(self, call: str) -> None:
        """Sums up and takes the sum. Every rank must take part.

        Raises:
            AmpRankError: see ``LossScale.agreed``. The flag waits on.
        """
        self._agree(lambda: self._scale.agreed(self.found_inf, self.groups, call))

    def leave_to_step(self) -> None:
        """Adds the flag to its optimizer's, for a step that takes it along before it reads the value."""
        if (flags := self._flags()) is not None:
            self.is_added = True
            flags.add(self._loss_id, self._scale, self.found_inf)

    def _agree(self, agree: Callable[[], Tensor]) -> None:
        try:
            found_inf = agree()
        except AmpRankError:
            self.failed = True
            raise
        self.drop()
        if (flags := self._flags()) is not None:
            flags.undecided = None
            if not self.is_added:
                flags.add(self._loss_id, self._scale, found_inf)
        if self.is_added:
            self.found_inf.copy_(found_inf)
        if self.moves_scale:
            self._scale.update(found_inf)

    def drop(self) -> None:
        ALL[:] = [each for each in ALL if each is not self]


# In the order of the blocks, which is the same on every rank.
ALL: list[Waiting] = []


def of(owner: Any) -> list[Waiting]:
    """The flags of the blocks of a session."""
    return [flag for flag in ALL if flag.owner() is owner]


def summed(values: Tensor, groups: list[Any], call: str, has: str) -> Tensor:
    """The sums of a list of numbers over the ranks of groups. Takes the flags along that wait for these groups."""
    flags = [flag for flag in ALL if flag.groups == groups]
    joined = torch.cat([values, *(move(flag.sent(), values.device) for flag in flags)])
    reduced_over(joined, torch.distributed.ReduceOp.SUM, groups, call, f"a found_inf flag and {has}" if flags else has)
    for flag, part in zip(flags, joined[len(values) :].chunk(len(flags) or 1), strict=False):
        flag.receive(part, call)
    return joined[: len(values)].to(values.dtype)
