"""Steps that the device skips by itself: counted there, told on the host when word has arrived.

Counts are copied to the host without waiting, one copy under way at a time; they only grow, so that none is missed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ampctx.amp.loss_scale import LossScale
from ampctx.foreach import move

Verdicts = dict[int, tuple[LossScale, Tensor]]


class DeviceSkips:
    """The skips of one optimizer that decides on the device.

    Args:
        report: called with the number of skipped steps at the last report and now, and for each loss that overflowed
            in between, its id, its scale and the value of the scale.
    """

    def __init__(self, report: Callable[[int, int, list[tuple[int, LossScale, float]]], None]) -> None:
        self._report = report
        # 0-d fp32 on the device of the flags: exact to 2**24 skips.
        self._skipped: Tensor | None = None
        self._of_loss: dict[int, tuple[LossScale, Tensor]] = {}
        self._reported = 0
        self._reported_of_loss: dict[int, float] = {}
        self._copy: _Copy | None = None

    def count(self, found_inf: Tensor, verdicts: Verdicts) -> None:
        """Adds the outcome of a step: a 0-d flag, and those of the losses it came from. No host sync."""
        if self._skipped is None:
            self._skipped = torch.zeros_like(found_inf)
        self._skipped.add_(move(found_inf, self._skipped.device))
        for loss_id, (scale, flag) in verdicts.items():
            if loss_id not in self._of_loss or self._of_loss[loss_id][0] is not scale:
                self._of_loss[loss_id] = (scale, torch.zeros_like(self._skipped))
                self._reported_of_loss[loss_id] = 0.0
            self._of_loss[loss_id][1].add_(move(flag, self._skipped.device))

    def poll(self) -> None:
        """Reports what has arrived, and asks for news. No host sync."""
        if self._skipped is None or _is_capturing(self._skipped.device):
            return
        if self._copy is None:
            self._copy = self._ask()
        if self._copy.has_arrived():
            copy, self._copy = self._copy, None
            self._tell(copy)

    def total(self) -> int:
        """How many steps were skipped. A host sync."""
        if self._skipped is None:
            return 0
        self._copy = None
        copy = self._ask()
        copy.wait()
        self._tell(copy)
        return self._reported

    def _ask(self) -> _Copy:
        assert self._skipped is not None
        device = self._skipped.device
        of_loss = list(self._of_loss.items())
        # Not by scale_on, which keeps its copy: a graph captured from here on would go on with that one.
        scales = [move(scale.tensor(device), device) for _, (scale, _) in of_loss]
        values = torch.stack([self._skipped, *(counted for _, (_, counted) in of_loss), *scales])
        return _Copy(values, [(loss_id, scale) for loss_id, (scale, _) in of_loss])

    def _tell(self, copy: _Copy) -> None:
        skipped, *rest = copy.values()
        counts, values = rest[: len(copy.losses)], rest[len(copy.losses) :]
        overflowed = []
        for (loss_id, scale), counted, value in zip(copy.losses, counts, values, strict=True):
            if counted > self._reported_of_loss.get(loss_id, 0.0):
                overflowed.append((loss_id, scale, value))
                self._reported_of_loss[loss_id] = counted
        if int(skipped) > self._reported:
            before, self._reported = self._reported, int(skipped)
            self._report(before, self._reported, overflowed)


class _Copy:
    """A 1-d tensor on its way to the host."""

    def __init__(self, tensor: Tensor, losses: list[tuple[int, LossScale]]) -> None:
        self.losses = losses
        self._event = None
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))
        else:
            self._host = tensor.cpu()

    def has_arrived(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def values(self) -> list[float]:
        return self._host.tolist()


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
