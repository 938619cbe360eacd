"""Counts the steps that the device skips by itself, and reports them on the host without a host sync.

Asynchronous copies bring the counts to the host, one at a time. Counts only grow, so none is missed.
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
    """The skips of one optimizer that skips on the device.

    Args:
        report: called with the number of skipped steps at the last report, the number now, and a list of (loss id,
            scale, value of the scale) of the losses that overflowed in between.
        in_a_row: whether to count skips in a row, too.

    The attribute ``in_a_row`` is the number of skips in a row that the host knows of. ``poll`` updates it.
    """

    def __init__(
        self, report: Callable[[int, int, list[tuple[int, LossScale, float]]], None], in_a_row: bool = False
    ) -> None:
        self._report = report
        self.in_a_row = 0
        self._counts_in_a_row = in_a_row
        self._streak: Tensor | None = None
        # 0-d fp32 on the device of the flags: exact up to 2**24 skips.
        self._skipped: Tensor | None = None
        self._of_loss: dict[int, tuple[LossScale, Tensor]] = {}
        self._reported = 0
        self._reported_of_loss: dict[int, float] = {}
        self._copy: _Copy | None = None

    def count(self, found_inf: Tensor, flags: Flags) -> None:
        """Counts a step by its 0-d flag and the flags of its losses. No host sync."""
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
        """Counts a decision of the host in the skips in a row. No host sync."""
        self._copy = None  # the pending copy does not include this step
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        if self._streak is not None:
            self._streak.fill_(self.in_a_row)

    def poll(self) -> None:
        """Reports counts that have arrived, and starts the next copy. No host sync."""
        if self._skipped is None or is_capturing():
            return
        # On the CPU one number tells whether there is anything to report. ``_ask`` reads all of them.
        if self._skipped.is_cpu and self._streak is None:
            skipped: Any = self._skipped.tolist()  # 0-d: a number
            if skipped == self._reported:
                return
        if self._copy is None:
            self._copy = self._ask()
        if self._copy.event is None or self._copy.event.query():
            copy, self._copy = self._copy, None
            self._tell(copy)

    def total(self) -> int:
        """The number of skipped steps. Host sync."""
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
        # Not with scale_on, which keeps its copy: a CUDA graph captured later would read that copy.
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
        # None if the copy is synchronous.
        self.event = None
        if tensor.device.type == "cuda":
            self.host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self.host.copy_(tensor, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record(torch.cuda.current_stream(tensor.device))
        else:
            self.host = tensor.cpu()


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured, so that nothing can be read."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@functools.cache
def asks_for_grad_scaler(step: Callable) -> bool:
    """Whether ``step`` takes ``grad_scaler``, a protocol that torch has deprecated. Do not pass bound methods: the
    cache would keep their object alive."""
    return "grad_scaler" in inspect.signature(step).parameters


def skips_by_itself(optimizer: Any, before_backward: bool = False) -> bool:
    """Whether the optimizer's kernels skip by ``found_inf``, as torch's do with ``fused=True`` in every group.

    ``before_backward``: a closure will run first, so it is unknown which parameters have gradients.
    """
    return (
        declares(optimizer, "_step_supports_amp_scaling")
        and all(group.get("fused", True) for group in optimizer.param_groups)
        # For LARC, the optimizer inside decides.
        and (
            not isinstance(getattr(optimizer, "optim", optimizer), torch.optim.SGD)
            or set_up_momentum(getattr(optimizer, "optim", optimizer), before_backward)
        )
    )


@torch.no_grad()
def set_up_momentum(optimizer: Any, before_backward: bool) -> bool:
    """Creates momentum buffers of zeros. False if torch's fused SGD cannot skip its first step.

    torch (2.13) leaves the momentum buffers of a skipped first step uninitialized. Buffers of zeros give the same
    steps without dampening. With dampening the host must read the flag of the first step.
    ``before_backward``: a closure will run first, so it is unknown which parameters have gradients.
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
