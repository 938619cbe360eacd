"""Counts the steps that the device skips by itself, and reports them on the host without a host sync.

Asynchronous copies bring the counts to the host, one at a time. Counts only grow, so none is missed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ampctx._errors import AmpError
from ampctx.kernels import handles, ops
from ampctx.kernels.foreach import move
from ampctx.kernels.reference import is_dense, same_layout, skip_counts
from ampctx.scaling.loss_scale import LossScale
from ampctx.weights.step import declares

# Per loss id, its scale and a 0-d flag.
Flags = dict[int, tuple[LossScale, Tensor]]


class SkipCounts:
    """The numbers of a loss for ``skips`` of an optimizer op, as ``Step.counts``. ``is_taken``: whether a step has
    counted itself."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors, self.device = tensors, tensors[0].device
        self.is_taken = False
        # Of the step that these were offered for. A step that raised and is tried again has the same one.
        self.found_inf: Tensor | None = None
        self._held: handles.HeldTensors | None = None

    def take(self, device: torch.device, along: Sequence[Tensor]) -> Sequence[Tensor]:
        """The numbers, once; none on another device. ``along``: another list of the call. No host sync."""
        if self.is_taken or device != self.device:
            return ()
        self.is_taken = True
        if type(along) not in handles.HANDLES:
            return self.tensors
        if self._held is None:
            self._held = handles.hold(self.tensors)
        return self.tensors if self._held is None else self._held


class DeviceSkips:
    """The skips of one optimizer that skips on the device, for ``GuardedStep``. ``report``: as its ``_report``.

    The attribute ``in_a_row`` is the number of skips in a row that the host knows of. ``poll`` updates it.
    """

    def __init__(self, report: Callable[..., None], losses: int, in_a_row: bool) -> None:
        self._report = report
        self.in_a_row = 0
        self._counts_in_a_row = in_a_row
        # Those of ``ops.count_skip``, on the device of the flags. It has all slots from the beginning, so that a CUDA
        # graph counts where later steps count. The last slot is that of gradients from outside of blocks, loss id -1.
        self._counts: Tensor | None = None
        self._slots = losses + 1
        self._scales: dict[int, LossScale] = {}
        # Those that an optimizer was offered last: the loss id, its scale, and the counts.
        self._offered: tuple[int, LossScale, SkipCounts] | None = None
        self._reported = 0
        self._reported_of_loss: dict[int, float] = {}
        self._copy: _Copy | None = None

    def count(self, found_inf: Tensor, flags: Flags) -> None:
        """Counts a step by its 0-d flag and the flags of its losses. No host sync."""
        counts, is_first = self._counts_on(found_inf.device), True
        for loss_id, (scale, flag) in flags.items():
            device, tensors = counts.device, (found_inf, flag, scale.tensor(counts.device))
            found, raised, value = (t if t.device == device else move(t, device) for t in tensors)
            ops.count_skip(counts, found, raised, value, self._slot(counts, loss_id, scale), is_first)
            is_first = False

    def offer(self, found_inf: Tensor, flags: Flags) -> SkipCounts | None:
        """Counts for an optimizer that counts its steps itself. None unless ``found_inf`` is the flag of one loss, with
        a scale on its device. No host sync."""
        if len(flags) != 1:
            return None
        ((loss_id, (scale, flag)),) = flags.items()
        value, device = scale.scale, found_inf.device
        if flag is not found_inf or value is None or value.device != device or value.dtype != torch.float32:
            return None
        counts = self._counts_on(device)
        if counts.device != device:
            return None
        slot = self._slot(counts, loss_id, scale)
        kept = self._offered
        if kept is None or kept[:2] != (loss_id, scale) or kept[2].tensors[4] is not value:
            kept = self._offered = (loss_id, scale, SkipCounts([*skip_counts(counts, slot), value]))
        counts_of_step = kept[2]
        if counts_of_step.found_inf is not found_inf:
            counts_of_step.found_inf, counts_of_step.is_taken = found_inf, False
        return counts_of_step

    def _counts_on(self, device: torch.device) -> Tensor:
        if self._counts is None:
            self._counts = torch.zeros(2 + 2 * self._slots, dtype=torch.float32, device=device)
            if self.in_a_row:
                self._counts[1].fill_(self.in_a_row)
        return self._counts

    def _slot(self, counts: Tensor, loss_id: int, scale: LossScale) -> int:
        slot = loss_id % self._slots
        if self._scales.get(loss_id) is not scale:
            if loss_id in self._scales:
                counts[2 + 2 * slot].zero_()
            self._scales[loss_id], self._reported_of_loss[loss_id] = scale, 0.0
        return slot

    def decided_on_host(self, skipped: bool) -> None:
        """Counts a decision of the host in the skips in a row. No host sync."""
        self._copy = None  # the pending copy does not include this step
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        if self._counts is not None:
            self._counts[1].fill_(self.in_a_row)

    def poll(self) -> None:
        """Reports counts that have arrived, and starts the next copy. No host sync."""
        if self._counts is None:
            return
        if self._counts.is_cpu and not self._counts_in_a_row:
            return self._tell(self._counts.tolist())
        if is_capturing():
            return
        if self._copy is None:
            self._copy = _Copy(self._counts)
        if self._copy.event is None or self._copy.event.query():
            copy, self._copy = self._copy, None
            self._tell(copy.host.tolist())

    def total(self) -> int:
        """The number of skipped steps. Host sync."""
        if self._counts is None:
            return 0
        self._copy = None
        self._tell(self._counts.tolist())
        return self._reported

    def _tell(self, counts: list[float]) -> None:
        skipped = int(counts[0])
        if self._counts_in_a_row:
            self.in_a_row = int(counts[1])
        if skipped <= self._reported:
            return
        overflowed = []
        for loss_id, scale in self._scales.items():
            counted, value = counts[2 + 2 * (loss_id % self._slots) :][:2]
            if counted > self._reported_of_loss[loss_id]:
                overflowed.append((loss_id, scale, value))
                self._reported_of_loss[loss_id] = counted
        before, self._reported = self._reported, skipped
        self._report(before, skipped, overflowed)


class _Copy:
    """Counts on their way to the host. ``event``: None if the copy is synchronous."""

    def __init__(self, counts: Tensor) -> None:
        self.event = None
        if counts.is_cuda:
            self.host = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
            self.host.copy_(counts, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record(torch.cuda.current_stream(counts.device))
        else:
            self.host = counts.to("cpu", copy=True)


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
    inner = getattr(optimizer, "optim", optimizer)  # for LARC, the optimizer inside decides
    return (
        declares(optimizer, "_step_supports_amp_scaling")
        and all(group.get("fused", True) for group in optimizer.param_groups)
        and (not isinstance(inner, torch.optim.SGD) or set_up_momentum(inner, before_backward))
    )


@torch.no_grad()
def set_up_momentum(optimizer: Any, before_backward: bool) -> bool:
    """Creates momentum buffers of zeros. False if torch's fused SGD cannot skip its first step.

    torch (2.13) leaves the momentum buffers of a skipped first step uninitialized. Zeros give the same steps without
    dampening. With dampening the host must read the flag of the first step. ``before_backward``: as above.
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


@torch.no_grad()
def align_gradients(optimizer: Any) -> None:
    """Copies gradients into the layout of their parameters where these differ, in groups with ``fused``. No host sync.

    torch's fused optimizers (2.13) read parameter, gradient and state in memory order, without a check that the layouts
    agree. ampctx.optimizers handle this themselves.

    Raises:
        AmpError: a parameter whose elements do not fill one block of memory, by name. Nothing has changed then.
    """
    others: list[tuple[Tensor, Tensor]] = []
    for g, group in enumerate(optimizer.param_groups):
        if not group.get("fused"):
            continue
        for i, p in enumerate(group["params"]):
            grad = p.grad
            if grad is None or grad.layout != torch.strided or (p.is_contiguous() and grad.is_contiguous()):
                continue
            if not is_dense(p):
                raise AmpError(
                    f"{type(optimizer).__name__} with fused=True steps the wrong memory of "
                    f"param_groups[{g}]['params'][{i}], whose elements do not fill one block of memory. Make the "
                    "parameter contiguous, or pass fused=False."
                )
            if not same_layout(grad, p):
                others.append((p, grad))
    for p, grad in others:
        p.grad = torch.empty_like(p, dtype=grad.dtype, requires_grad=False).copy_(grad)
