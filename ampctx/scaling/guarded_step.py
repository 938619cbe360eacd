"""Decides whether a step runs or is skipped after an overflow, and records it.

amp and ``GradScaler`` have one ``GuardedStep`` for each optimizer, and use it in this order:

    decide   read the flags (``overflowed``), or leave them to the device unless ``overflowed_instead_of_device``
    act      run the step, skip it, or let the optimizer decide
    record   ``stepped``, ``skipped`` or ``left_to_device``: outcome, history, counts of skips, listeners
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampctx._errors import AmpStallError
from ampctx.kernels.foreach import join_flags
from ampctx.scaling.device_skips import DeviceSkips, Flags, SkipCounts, is_capturing
from ampctx.scaling.history import StepHistory
from ampctx.scaling.loss_scale import LossScale, check_count
from ampctx.scaling.outcome import Culprits, StepOutcome, gathered, listed
from ampctx.scaling.undo import with_wrapped
from ampctx.weights.step import Counts

# The loss id of gradients that no block has checked.
OUTSIDE_OF_BLOCKS = -1
Overflowed = list[tuple[int, LossScale]]


def overflowed(flags: Flags) -> Overflowed:
    """The losses whose gradients overflowed. Host sync; after an overflow of several losses, a second one."""
    if not flags:
        return []
    each = [flag for _, flag in flags.values()]
    if join_flags(each, each[0].device).item() == 0:
        return []
    values = gathered(each).tolist() if len(each) > 1 else [1.0]
    return [(loss_id, scale) for (loss_id, (scale, _)), value in zip(flags.items(), values, strict=True) if value]


class Known(NamedTuple):
    """The scales and the gradient norm of a step."""

    scales: dict[int, Any]
    grad_norm: Tensor | None


class Listeners(NamedTuple):
    """The callbacks of a ``GuardedStep``.

    skipped: gets the number of skips at the last report, the number now, (loss id, scale, value) of each loss that
        overflowed, the parameters with non-finite gradients, and the number of steps so far. None: skips on the
        device are counted only for a limit.
    stepped: gets the optimizer and the outcome of every step, while one of ``hooks`` is not empty.
    """

    skipped: Callable[[int, int, list[tuple[int, LossScale, float]], Culprits, int], None] | None = None
    stepped: Callable[[Any, StepOutcome], None] | None = None
    hooks: tuple[Collection[Any], ...] = ()


def check_limit(max_consecutive_skips: Any) -> int | None:
    return None if max_consecutive_skips is None else check_count("max_consecutive_skips", max_consecutive_skips, 1)


class GuardedStep:
    """Decides and records the steps of one optimizer, without a reference to it.

    Args:
        limit: the number of steps that may be skipped in a row. None: any number.
        history_length: the number of steps that the history keeps.
        losses: the number of loss ids.
        listeners: the callbacks.

    ``outcome``: of the latest step, None before the first. ``epoch``: counts calls that may change the gradients in
    ``.grad`` after a step.
    """

    def __init__(
        self, limit: int | None, history_length: int, losses: int = 1, listeners: Listeners | None = None
    ) -> None:
        self.outcome: StepOutcome | None = None
        self.history = StepHistory(history_length, losses)
        self.epoch = 0
        self._listeners = Listeners() if listeners is None else listeners
        self._counts_on_device = limit is not None or self._listeners.skipped is not None
        self._skipped_on_host = 0
        self._limit = limit
        # (Loss id, scale after a skip), as far as the host knows.
        self._scales = scales = deque[tuple[int, float]](maxlen=16)
        tell, history = self._listeners.skipped, self.history

        def report(before: int, now: int, losses: list[tuple[int, LossScale, float]], culprits: Culprits = ()) -> None:
            scales.extend((loss_id, value) for loss_id, _, value in losses)
            if tell is not None:
                tell(before, now, losses, culprits, history.count + 1)

        self._report = report
        self._on_device = DeviceSkips(report, losses, in_a_row=limit is not None)

    def skipped_steps(self) -> int:
        """The number of skipped steps. Host sync if the device decides."""
        return self._skipped_on_host + self._on_device.total()

    def overflowed_instead_of_device(self, flags: Callable[[], Flags]) -> Overflowed:
        """The losses that overflowed, if one more skip in a row would exceed the limit. Otherwise [], and the device
        decides. Host sync only at the limit."""
        if self._limit is None:
            return []
        self._on_device.poll()
        if self._on_device.in_a_row < self._limit:
            return []
        if not (found := overflowed(flags())):
            self._on_device.decided_on_host(skipped=False)
        return found

    def stepped(self, optimizer: Any, known: Known) -> None:
        """Records a step that the host decided on and that ran."""
        if self._limit is not None:
            self._on_device.decided_on_host(skipped=False)
        self.conclude(optimizer, StepOutcome(scales=known.scales, grad_norm=known.grad_norm), by_device=False)

    def skipped(self, optimizer: Any, losses: Overflowed, known: Known, culprits: Culprits) -> None:
        """Records a step that the host has skipped.

        Raises:
            AmpStallError: this skip exceeds the limit of skips in a row.
        """
        self._skipped_on_host += 1
        # torch's LR schedulers warn if they step before the optimizer. A skipped step came in the right order. The
        # attribute is private to torch.optim.lr_scheduler; a test guards it. Schedulers may use the wrapped optimizer.
        for one in with_wrapped(optimizer):
            one._opt_called = True
        values = [(loss_id, scale, scale.value()) for loss_id, scale in losses] if self._counts_on_device else []
        self._report(self._skipped_on_host - 1, self._skipped_on_host, values, culprits)
        ids = [loss_id for loss_id, _ in losses]
        outcome = StepOutcome(ids, scales=known.scales, grad_norm=known.grad_norm, culprits=culprits)
        if self._limit is not None:
            self._on_device.decided_on_host(skipped=True)
        self.conclude(optimizer, outcome, by_device=False)
        if self._limit is not None and self._on_device.in_a_row > self._limit:
            raise self._stalled(type(optimizer).__name__, outcome, culprits)

    def _stalled(self, optimizer: str, outcome: StepOutcome, culprits: Culprits) -> AmpStallError:
        several = len({loss_id for loss_id, _ in self._scales}) > 1
        course = ", ".join(f"loss {i}: {value}" if several else str(value) for i, value in self._scales)
        return AmpStallError(
            f"{self._on_device.in_a_row} steps of {optimizer} in a row were skipped "
            f"(max_consecutive_skips={self._limit}). Weights are unchanged. Non-finite gradients: "
            f"{listed(culprits, 8) if culprits else 'not known'}. Loss scale after skips: {course or 'not known'}. If "
            "the scale is far down, scaling is not the cause: check input, loss and weights for inf and nan "
            "(torch.autograd.set_detect_anomaly names the op), keep these layers in fp32, use bfloat16 (opt_level O4 "
            "or O5), or lower the learning rate. At the start of a run, begin with a smaller scale or allow more "
            "skips. See docs/errors.md#the-loss-scale-goes-to-0-or-the-loss-is-nan.",
            outcome=outcome,
            scale_history=list(self._scales),
        )

    def skip_counts(self, found_inf: Tensor | None, flags: Flags) -> SkipCounts | None:
        """Counts for a step by ``found_inf`` that counts itself, or None. No host sync."""
        if not self._counts_on_device or found_inf is None or torch.compiler.is_compiling():
            return None
        return self._on_device.offer(found_inf, flags)

    def left_to_device(
        self,
        optimizer: Any,
        flags: Flags,
        known: Known,
        found_inf: Tensor | None,
        culprits: Callable[[], Culprits],
        later: Callable[[int], Culprits | None],
        external: bool = False,
        counts: Counts | None = None,
    ) -> StepOutcome:
        """Makes the outcome of a step that the device decided on, for ``conclude``. Host sync only if there are hooks.

        Args:
            found_inf: the flag that the step used.
            culprits, later: give the parameters with non-finite gradients now, or later for the ``epoch`` of the step.
            external: whether ``found_inf`` includes a flag that no loss has raised.
            counts: those that the step was offered.
        """
        epoch = self.epoch
        outcome = StepOutcome(
            {loss_id: flag for loss_id, (_, flag) in flags.items()},
            external=found_inf if external else None,
            scales=known.scales,
            grad_norm=known.grad_norm,
            culprits=lambda: later(epoch),
        )
        if any(self._listeners.hooks) and not is_capturing() and outcome.skipped:
            outcome.name(culprits())
        if flags and found_inf is not None and self._counts_on_device and not (counts and counts.is_taken):
            self._on_device.count(found_inf, flags)
        return outcome

    def conclude(self, optimizer: Any, outcome: StepOutcome, by_device: bool = True) -> None:
        """Ends a step: history and hooks. ``by_device``: the step was ``left_to_device``."""
        if by_device and self._counts_on_device:
            self._on_device.poll()
        self.outcome = outcome
        if is_capturing():
            return
        self.history.add(outcome)
        if self._listeners.stepped is not None and any(self._listeners.hooks):
            self._listeners.stepped(optimizer, outcome)
