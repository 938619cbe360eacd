"""Checks that a session is used from one thread: blocks of several would mix up their gradients."""

from __future__ import annotations

import threading

from ampctx._errors import AmpError


class OwnThread:
    """The threads of one session: the one that casts per op, and the one of the open ``scale_loss`` blocks."""

    def __init__(self) -> None:
        self._of_casts: threading.Thread | None = None
        self._of_blocks: list[threading.Thread] = []

    def claim_casts(self) -> None:
        """Notes that this thread has switched on the casts per op."""
        self._of_casts = threading.current_thread()

    def check(self, name: str, casts_on: bool) -> None:
        """Raises AmpError if active casts or an open block belong to another thread that is alive."""
        here = threading.current_thread()
        casts = self._of_casts
        if casts_on and casts is not None and casts is not here and casts.is_alive():
            raise AmpError(
                f"amp.{name} was called in thread {here.name!r}, but amp.initialize switched on the casts of O1/O4 in "
                f"thread {casts.name!r}. torch's autocast belongs to a thread. Call amp.initialize, amp.scale_loss and "
                "amp.reset in the thread that trains. Forward passes may run in any thread."
            )
        blocks = next(iter(self._of_blocks), here)
        if blocks is not here and blocks.is_alive():
            raise AmpError(
                f"amp.{name} was called in thread {here.name!r}, but a scale_loss block of the same session is open in "
                f"thread {blocks.name!r}. ampctx cannot tell their gradients apart. Leave that block first, or give "
                "each thread its own AmpSession."
            )

    def enter_block(self, casts_on: bool) -> None:
        """Notes that a block begins in this thread. Raises like ``check``; call ``leave_block`` in any case."""
        # No lock: an interrupt could leave it locked. If two threads come at once, the first one recorded stays.
        here = threading.current_thread()
        for thread in list(self._of_blocks):
            if not thread.is_alive() and thread in self._of_blocks:
                self._of_blocks.remove(thread)
        self._of_blocks.append(here)
        if self._of_blocks[0] is not here or (casts_on and self._of_casts is not here):
            self.check("scale_loss", casts_on)

    def leave_block(self) -> None:
        """Notes that the block has ended, or was refused."""
        # The last entry of this thread. There is none if an interrupt came before ``enter_block`` made it.
        here = threading.current_thread()
        last = next((i for i in reversed(range(len(self._of_blocks))) if self._of_blocks[i] is here), None)
        if last is not None:
            del self._of_blocks[last]
