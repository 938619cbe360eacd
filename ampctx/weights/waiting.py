"""The ``found_inf`` flags of blocks that ranks have yet to join.

With DTensors a flag waits at the end of its block. The next call that must reduce over the same ranks takes it along,
which is ``clip_grad_norm_`` in most loops; at the latest the step or the next block asks for it. All of these come in
the same order on every rank, and nothing else may decide: ranks collect an optimizer that is gone at different times.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ampctx._errors import AmpRankError


class Waiting:
    """A flag.

    Attributes:
        groups: the process groups to reduce over, one after the other.
        sent: makes the fp64 vector to sum up over the ranks, on the device of the flag.
        receive: takes the sum, and the name of the call for messages. Not called after a collective that failed.
        decide: does both, with the name of the call.
        moves_scale: whether the flag will update the loss scale. Not after a scale was loaded.
        failed: whether ranks could not agree on it.

    ``owner``: the blocks of a session.
    """

    def __init__(
        self,
        owner: Any,
        groups: list[Any],
        sent: Callable[[], Tensor],
        received: Callable[[Tensor, str], Tensor],
        agreed: Callable[[str], Tensor],
        conclude: Callable[[Waiting, Tensor], None],
    ) -> None:
        self._owner = weakref.ref(owner)
        self.groups, self.sent, self.moves_scale, self.failed = groups, sent, True, False
        self.receive: Callable[[Tensor, str], None] = lambda joined, call: self._try(lambda: received(joined, call))
        self.decide: Callable[[str], None] = lambda call: self._try(lambda: agreed(call))
        self._conclude = conclude
        ALL.append(self)

    def _try(self, agree: Callable[[], Tensor]) -> None:
        try:
            found_inf = agree()
        except AmpRankError:
            self.failed = True
            raise
        self.drop()
        self._conclude(self, found_inf)

    def drop(self) -> None:
        ALL[:] = [each for each in ALL if each is not self]

    def is_of(self, owner: Any) -> bool:
        return self._owner() is owner


# In the order of the blocks, which is the same on every rank.
ALL: list[Waiting] = []


def of(owner: Any) -> list[Waiting]:
    """The flags of the blocks of a session."""
    return [flag for flag in ALL if flag.is_of(owner)]


def over(groups: list[Any]) -> list[Waiting]:
    """The flags that wait for a reduction over these groups."""
    return [flag for flag in ALL if flag.groups == groups]
