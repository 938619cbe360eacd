"""Which thread a session is used from.

Blocks of several threads would take each other's gradients, and torch's autocast belongs to a thread.
"""

from __future__ import annotations

import threading

from ampctx._errors import AmpError


class OwnThread:
    """The threads of one session: that of its casts op by op, and that of its open ``scale_loss`` blocks.

    Threads that ended are forgotten.
    """

    def __init__(self) -> None:
        self._of_casts: threading.Thread | None = None
        self._of_blocks: list[threading.Thread] = []

    def claim_casts(self) -> None:
        """Casts op by op are switched on here."""
        self._of_casts = threading.current_thread()

    def check(self, name: str, casts_on: bool) -> None:
        """AmpError when the casts that are on, or a block that is open, belong to another thread that lives."""
        here = threading.current_thread()
        casts = self._of_casts
        if casts_on and casts is not None and casts is not here and casts.is_alive():
            raise AmpError(
                f"amp.{name} was called in thread {here.name!r}, while amp.initialize switched on the casts of O1/O4 "
                f"in thread {casts.name!r}: torch's autocast belongs to a thread. Call amp.initialize, amp.scale_loss "
                "and amp.reset in the thread that trains; forwards may run in any."
            )
        blocks = next(iter(self._of_blocks), here)
        if blocks is not here and blocks.is_alive():
            raise AmpError(
                f"amp.{name} was called in thread {here.name!r}, while a scale_loss block of the same session is open "
                f"in thread {blocks.name!r}: their gradients cannot be told apart. Leave that block first, or give "
                "each thread an AmpSession of its own."
            )

    def enter_block(self, casts_on: bool) -> None:
        """A block begins in this thread. Raises as ``check`` does; ``leave_block`` follows in any case."""
        # No lock, which an interrupt could leave locked: of two threads that come at once, the first on record stays.
        for thread in list(self._of_blocks):
            if not thread.is_alive() and thread in self._of_blocks:
                self._of_blocks.remove(thread)
        here = threading.current_thread()
        self._of_blocks.append(here)
        if casts_on or self._of_blocks[0] is not here:
            self.check("scale_loss", casts_on)

    def leave_block(self) -> None:
        """It ends, or it was refused."""
        # The last entry of this thread: none where an interrupt came before there was one.
        here = threading.current_thread()
        for i in reversed(range(len(self._of_blocks))):
            if self._of_blocks[i] is here:
                del self._of_blocks[i]
                return
