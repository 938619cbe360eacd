"""Steps that the device skips by itself: counted there, told on the host when word has arrived.

Counts are copied to the host without waiting, one copy under way at a time; they only grow, so that none is missed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ampctx.kernels.foreach import move
from ampctx.masters.lazy_grads import declares
from ampctx.scaling.loss_scale import LossScale

# Per loss id, its scale and a 0-d flag.
Flags = dict[int, tuple[LossScale, Tensor]]


class DeviceSkips:
    """The skips of one optimizer that decides on the device.

    Args:
        report: called with the number of skipped steps at the last report and now, and for each loss that overflowed
            in between, its id, its scale and the value of the scale.
        in_a_row: whether to count skips in a row, too.

    ``in_a_row`` is their number, as far as is known: with ``poll`` word of the device arrives.
    """

    def __init__(
        self, report: Callable[[int, int, list[tuple[int, LossScale, float]]], None], in_a_row: bool = False
    ) -> None:
        self._report = report
        self.in_a_row = 0
        self._counts_in_a_row = in_a_row
        self._streak: Tensor | None = None
        # 0-d fp32 on the device of the flags: exact to 2**24 skips.
        self._skipped: Tensor | None = None
        self._of_loss: dict[int, tuple[LossScale, Tensor]] = {}
        self._reported = 0
        self._reported_of_loss: dict[int, float] = {}
        self._copy: _Copy | None = None

    def count(self, found_inf: Tensor, flags: Flags) -> None:
        """Adds the outcome of a step: a 0-d flag, and those of the losses it came from. No host sync."""
        if self._skipped is None:
            self._skipped = torch.zeros_like(found_inf)
        device = self._skipped.device
        flag = found_inf if found_inf.device == device else move(found_inf, device)
        self._skipped.add_(flag)
        if self._counts_in_a_row:
            if self._streak is None:
                self._streak = torch.full_like(self._skipped, self.in_a_row)
            self._streak.add_(1).mul_(flag)
        for loss_id, (scale, flag) in flags.items():
            if loss_id not in self._of_loss or self._of_loss[loss_id][0] is not scale:
                self._of_loss[loss_id] = (scale, torch.zeros_like(self._skipped))
                self._reported_of_loss[loss_id] = 0.0
            self._of_loss[loss_id][1].add_(flag if flag.device == device else move(flag, device))

    def decided_on_host(self, skipped: bool) -> None:
        """Goes on counting skips in a row after a decision that was not the device's. No host sync."""
        self._copy = None  # what is under way does not know of it
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        if self._streak is not None:
            self._streak.fill_(self.in_a_row)

    def poll(self) -> None:
        """Reports what has arrived, and asks for news. No host sync."""
        if self._skipped is None or is_capturing():
            return
        if self._copy is None:
            self._copy = self._ask()
        if self._copy.event is None or self._copy.event.query():
            copy, self._copy = self._copy, None
            self._tell(copy)

    def total(self) -> int:
        """How many steps were skipped. A host sync."""
        if self._skipped is None:
            return 0
        self._copy = None
        copy = self._ask()
        if copy.event is not None:
            copy.event.synchronize()
        self._tell(copy)
        return self._reported

    def _ask(self) -> _Copy:
        assert self._skipped is not None
        device = self._skipped.device
        of_loss = list(self._of_loss.items())
        # Not by scale_on, which keeps its copy: a graph captured from here on would go on with that one.
        scales = [
            move(scale.tensor(device) if scale.scale is None else scale.scale, device) for _, (scale, _) in of_loss
        ]
        streak = self._skipped if self._streak is None else self._streak
        values = torch.stack([self._skipped, streak, *(counted for _, (_, counted) in of_loss), *scales])
        return _Copy(values, [(loss_id, scale) for loss_id, (scale, _) in of_loss])

    def _tell(self, copy: _Copy) -> None:
        skipped, streak, *rest = copy.host.tolist()
        if self._streak is not None:
            self.in_a_row = int(streak)
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
        # None where the copy is made when it is asked for.
        self.event = None
        if tensor.device.type == "cuda":
            self.host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self.host.copy_(tensor, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record(torch.cuda.current_stream(tensor.device))
        else:
            self.host = tensor.cpu()


def is_capturing() -> bool:
    """Whether what runs goes into a CUDA graph, where nothing can be read."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@functools.cache
def asks_for_grad_scaler(step: Callable) -> bool:
    """A protocol that torch has deprecated: such a step asks a GradScaler for the flag. Not for methods of an object,
    which would be kept alive."""
    return "grad_scaler" in inspect.signature(step).parameters


def skips_by_itself(optimizer: Any, before_backward: bool = False) -> bool:
    """Whether the optimizer's kernels skip by ``found_inf``, as torch's do with ``fused=True`` in every group.

    ``before_backward``: which parameters have a gradient is not known yet, a closure is still to run.
    """
    return (
        declares(optimizer, "_step_supports_amp_scaling")
        and all(group.get("fused", True) for group in optimizer.param_groups)
        # What LARC wraps counts.
        and (
            not isinstance(getattr(optimizer, "optim", optimizer), torch.optim.SGD)
            or set_up_momentum(getattr(optimizer, "optim", optimizer), before_backward)
        )
    )


@torch.no_grad()
def set_up_momentum(optimizer: Any, before_backward: bool) -> bool:
    """False where torch's fused SGD cannot be trusted to skip its first step.

    torch (2.13) leaves the momentum buffers of a skipped first step uninitialized. Buffers of zeros give the same
    steps, as long as there is no dampening. With dampening the host has to look at the flag of the first step.
    ``before_backward``: which parameters have a gradient is not known yet, a closure is still to run.
    """
    for group in optimizer.param_groups:
        if group["momentum"] == 0:
            continue
        steps = [p for p in group["params"] if (p.requires_grad if before_backward else p.grad is not None)]
        fresh = [p for p in steps if optimizer.state[p].get("momentum_buffer") is None]
        if fresh and group["dampening"] != 0:
            return False
        for p in fresh:
            optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
    return True
