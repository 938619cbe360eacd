"""Which casts op by op are on. ``disable_casts``, steps and closures switch them off and on again."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from ampctx.casts.arguments import Undo
from ampctx.casts.autocast import Autocast


class CastSwitch:
    """The casts of one session that were switched on since the last reset, and what switches each off. The latest
    counts."""

    def __init__(self) -> None:
        self.undo: dict[Autocast, Undo] = {}

    def add(self, autocast: Autocast, undo: Undo) -> None:
        self.undo = {a: u for a, u in self.undo.items() if a.enabled} | {autocast: undo}

    @property
    def current(self) -> Autocast | None:
        """The casts that count: the latest that are on, or else the latest."""
        if not self.undo:
            return None
        autocasts = list(self.undo)
        return next((a for a in reversed(autocasts) if a.enabled), autocasts[-1])

    @property
    def enabled(self) -> bool:
        return any(autocast.enabled for autocast in self.undo)

    def active_dtype(self) -> torch.dtype | None:
        """The 16-bit type that ops are cast to right now, None when they are not."""
        autocast = self.current
        return autocast.dtype if autocast is not None and autocast.active else None

    def suspended(self) -> AbstractContextManager:
        """Casts are off. May nest."""
        if not self.undo:
            return nullcontext()
        return nullcontext() if (autocast := self.current) is None else autocast.suspended()

    def resumed(self) -> AbstractContextManager:
        """They are on again."""
        return nullcontext() if (autocast := self.current) is None else autocast.resumed()
