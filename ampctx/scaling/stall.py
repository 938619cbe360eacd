"""Stops a run whose steps are skipped one after the other, with a diagnosis."""

from __future__ import annotations

from collections import deque
from typing import Any

from ampctx._errors import AmpStallError
from ampctx.scaling.device_skips import DeviceSkips
from ampctx.scaling.loss_scale import check_count
from ampctx.scaling.outcome import StepOutcome, listed


def check_limit(max_consecutive_skips: Any) -> int | None:
    return None if max_consecutive_skips is None else check_count("max_consecutive_skips", max_consecutive_skips, 1)


class StallGuard:
    """Ends a run when more than ``limit`` steps of one optimizer in a row were skipped; None: never.

    Skips on the device are known late here. Once ``limit`` of them in a row are known, ``suspects`` says so, and the
    caller takes the next decision on the host.
    """

    def __init__(self, limit: int | None, skips: DeviceSkips, history: deque[tuple[int, float]]) -> None:
        """``history``: loss id and scale after a skip, as far as the host was told; somebody else's to fill."""
        self.limit = limit
        self._skips = skips
        self.history = history

    def suspects(self) -> bool:
        """Whether ``limit`` skips in a row are known of. No host sync."""
        if self.limit is None:
            return False
        self._skips.poll()
        return self._skips.in_a_row >= self.limit

    def stepped(self) -> None:
        """The host has let a step through."""
        if self.limit is not None:
            self._skips.decided_on_host(skipped=False)

    def skipped(self, optimizer: Any, outcome: StepOutcome) -> AmpStallError | None:
        """The host has skipped a step. Returns what is to be raised when that was one more in a row than ``limit``."""
        if self.limit is None:
            return None
        self._skips.decided_on_host(skipped=True)
        return self._error(type(optimizer).__name__, outcome) if self._skips.in_a_row > self.limit else None

    def _error(self, optimizer: str, outcome: StepOutcome) -> AmpStallError:
        culprits = outcome.culprits
        scales = list(self.history)
        several = len({loss_id for loss_id, _ in scales}) > 1
        course = ", ".join(f"loss {i}: {value}" if several else str(value) for i, value in scales)
        return AmpStallError(
            f"{self._skips.in_a_row} steps of {optimizer} in a row were skipped, and max_consecutive_skips is "
            f"{self.limit}. Parameters are what they were before. Not finite in the latest: "
            f"{listed(culprits, 8) if culprits else 'not known'}. The loss scale after skips: {course or 'not known'}. "
            "Scaling is not the reason when the scale has come down far: look for inf or nan in the input, the loss "
            "and the weights (torch.autograd.set_detect_anomaly names the op), keep the layers named here in fp32, use "
            "bfloat16 (opt_level O4 or O5), or lower the learning rate. At the very start of a run, begin with a "
            "smaller scale or allow more skips.",
            outcome=outcome,
            scale_history=scales,
        )
