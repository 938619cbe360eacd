"""The ``found_inf`` flags of blocks that ranks have yet to join.

With DTensors a flag waits at the end of its block. The next call that must reduce over the same ranks takes it along,
which is ``clip_grad_norm_`` in most loops; at the latest the step or the next block asks for it. All of these come in
the same order on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor


class Waiting(NamedTuple):
    """A flag.

    groups: the process groups to reduce over, one after the other.
    sent: makes the fp64 vector to sum up over the ranks, on the device of the flag.
    receive: takes the sum, and the name of the call for messages. Not called after a collective that failed.
    """

    groups: list[Any]
    sent: Callable[[], Tensor]
    receive: Callable[[Tensor, str], None]


# In the order of the blocks, which is the same on every rank.
ALL: list[Waiting] = []


def add(flag: Waiting) -> None:
    ALL.append(flag)


def remove(flag: Waiting) -> None:
    ALL[:] = [each for each in ALL if each is not flag]


def over(groups: list[Any]) -> list[Waiting]:
    """The flags that wait for a reduction over these groups."""
    return [flag for flag in ALL if flag.groups == groups]
