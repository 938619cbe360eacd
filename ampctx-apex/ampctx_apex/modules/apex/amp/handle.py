"""apex.amp.handle: ``scale_loss`` and ``disable_casts``, and the handle on the casts of O1, O4 and ``amp.init``."""

from __future__ import annotations

import torch

from ampctx import spi
from ampctx.spi import Autocast


class Handle:
    """``amp._amp_state.handle``, and what ``amp.init`` returns. Without an ``autocast`` it does nothing."""

    def __init__(self, autocast: Autocast | None) -> None:
        self.autocast = autocast

    def is_active(self) -> bool:
        """Whether ops are cast now. No host sync."""
        return self.autocast is not None and self.autocast.active

    @property
    def _is_active(self) -> bool:
        return self.is_active()

    @_is_active.setter
    def _is_active(self, value: bool) -> None:
        if self.autocast is not None:
            self.autocast.active = value

    def _clear_cache(self) -> None:
        torch.clear_autocast_cache()

    def _deactivate(self) -> None:
        """Ends the casts."""
        if self.autocast is not None:
            spi.end_casts(self.autocast)


__all__ = []
