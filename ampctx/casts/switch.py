"""The switch of a session's op casts. ``disable_casts`` and steps switch them off and on again."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from ampctx.casts.arguments import Undo
from ampctx.casts.autocast import Autocast

# For ``with``, where there are no casts.
AS_IT_IS = nullcontext()


class CastSwitch:
    """One session's ``Autocast`` objects since the last reset, each with its undo. The latest one counts."""

    def __init__(self) -> None:
        self.undo: dict[Autocast, Undo] = {}

    def add(self, autocast: Autocast, undo: Undo) -> None:
        self.undo = {a: u for a, u in self.undo.items() if a.enabled} | {autocast: undo}

    @property
    def current(self) -> Autocast | None:
        """The latest enabled ``Autocast``, or else the latest."""
        if not self.undo:
            return None
        latest = next(reversed(self.undo))
        return latest if latest.enabled else next((a for a in reversed(self.undo) if a.enabled), latest)

    @property
    def enabled(self) -> bool:
        return (current := self.current) is not None and current.enabled

    def active_dtype(self) -> torch.dtype | None:
        """The 16-bit dtype that ops are cast to right now, or None."""
        return now.dtype if (now := self.current) is not None and now.active else None

    def suspended(self) -> AbstractContextManager:
        """A context without casts. May nest."""
        return AS_IT_IS if (autocast := self.current) is None else autocast.suspended()

    def resumed(self) -> AbstractContextManager:
        """Within ``suspended``: a context with casts again."""
        return AS_IT_IS if (autocast := self.current) is None else autocast.resumed()
