"""Decides whether a step runs or is skipped after an overflow, and records it.

amp and ``GradScaler`` have one ``GuardedStep`` for each optimizer, and use it in this order:

    decide   read the flags (``overflowed``), or leave them to the device unless ``overflowed_instead_of_device``
    act      run the step, skip it, or let the optimizer decide
    record   ``stepped``, ``skipped`` or ``left_to_device``: outcome, history, counts of skips, listeners
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampctx._errors import AmpStallError
from ampctx.kernels.foreach import Factor, join_flags
from ampctx.masters import waiting
from ampctx.masters.lazy_grads import declares
from ampctx.scaling.device_skips import DeviceSkips, Flags, SkipCounts, is_capturing
from ampctx.scaling.history import StepHistory
from ampctx.scaling.loss_scale import LossScale, check_count
from ampctx.scaling.outcome import Culprits, StepOutcome, gathered, listed
from ampctx.scaling.undo import with_wrapped

# The loss id of gradients that no block has checked.
OUTSIDE_OF_BLOCKS = -1
Overflowed = list[tuple[int, LossScale]]


class FoundInfFlags:
    """``found_inf`` of each loss since the last step: the loss scale, and a 0-d flag on the device.

    ``by_loss`` decides about the next step. It stays set until then, even if later backwards are clean.
    """

    def __init__(self) -> None:
        self.by_loss: Flags = {}
        # The final flags among them.
        self._final: Flags = {}
        # The factors of the losses.
        self.scales_used: dict[int, Factor] = {}
        # A step raised. The flags stay for a second try, until the gradients are zeroed.
        self.of_failed_step = False
        # The flags of a running step.
        self._taken: tuple[Flags, Flags] | None = None
        # The flag of the latest block while ranks have yet to agree on it.
        self._undecided: waiting.Waiting | None = None

    def add(self, loss_id: int, scale: LossScale, found_inf: Tensor, final: bool = True) -> None:
        """ORs a flag in. ``final``: ``drop_provisional`` does not drop it. No host sync."""
        if loss_id in self.by_loss:
            found_inf = torch.maximum(self.by_loss[loss_id][1].to(found_inf.device), found_inf)
        self.by_loss[loss_id] = (scale, found_inf)
        if final:
            self._final[loss_id] = self.by_loss[loss_id]

    def drop_provisional(self, scale: LossScale) -> None:
        """Drops the flags of a scale that are not final: the caller of ``update_scale()`` decides about the skip."""
        for loss_id, (of, _) in list(self.by_loss.items()):
            if of is scale:
                del self.by_loss[loss_id]
                if loss_id in self._final:
                    self.by_loss[loss_id] = self._final[loss_id]

    def wait(self, loss_id: int, scale: LossScale, found_inf: Tensor, groups: list[Any], owner: Any) -> None:
        """Leaves a flag, and the update of its scale, to the next call that reduces over the process groups. The flag
        is final then. ``owner``: see ``Waiting``. No host sync."""
        reference = weakref.ref(self)

        def conclude(flag: waiting.Waiting, agreed: Tensor) -> None:
            if (flags := reference()) is not None:
                flags._undecided = None
                flags.add(loss_id, scale, agreed)
            if flag.moves_scale:
                scale.update(agreed)

        self._undecided = waiting.Waiting(
            owner,
            groups,
            lambda: scale.sent(found_inf),
            lambda joined, call: scale.received(joined, groups, call),
            lambda call: scale.agreed(found_inf, groups, call),
            conclude,
        )

    def decide(self, call: str) -> None:
        """Lets ranks agree on a flag that waits. Every rank must take part. ``call``: for messages.

        Raises:
            AmpRankError: see ``LossScale.agreed``. The flag waits on.
        """
        if self._undecided is not None:
            self._undecided.decide(call)

    def drop_undecided(self) -> None:
        if self._undecided is not None:
            self._undecided.drop()
            self._undecided = None

    def drop_failed(self) -> None:
        """Drops the flags of a block or step that an exception has ended."""
        if self._undecided is not None and self._undecided.failed:
            self.drop_undecided()
        self.clear()

    @property
    def has_failed(self) -> bool:
        return self.of_failed_step or (self._undecided is not None and self._undecided.failed)

    @property
    def are_of_blocks(self) -> bool:
        """Whether a block has checked gradients since the last step."""
        return self._undecided is not None or any(loss_id != OUTSIDE_OF_BLOCKS for loss_id in self.by_loss)

    def replace(self, by_loss: Flags, scales_used: dict[int, Factor]) -> None:
        """Replaces the flags by those of a checkpoint."""
        self.clear()
        self.drop_undecided()
        self.by_loss, self.scales_used = by_loss, scales_used

    def clear(self) -> None:
        self._taken = None
        self.by_loss, self._final, self.of_failed_step = {}, {}, False

    def take(self) -> Flags:
        """Takes the flags since the last step, to decide about this step."""
        taken = self.by_loss, self._final
        self.clear()
        self._taken = taken
        return taken[0]

    def forget_taken(self) -> None:
        """Forgets the taken flags: the step has used or dropped their gradients."""
        self._taken = None

    def give_back(self) -> None:
        """Restores the taken flags after a step that raised: its gradients are still there."""
        if self._taken is not None:
            self.by_loss, self._final = (
                {**flags, **now} for flags, now in zip(self._taken, (self.by_loss, self._final), strict=True)
            )
            self._taken = None
        # Also for flags of a block before the step: zeroing the gradients clears them.
        self.of_failed_step = True

    def take_scales(self) -> dict[int, Factor]:
        scales, self.scales_used = self.scales_used, {}
        return scales


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
        overflowed, and the parameters with non-finite gradients. None: skips on the device are counted only for a
        limit.
    stepped: gets the optimizer and the outcome of every step, while one of ``hooks`` is not empty.
    """

    skipped: Callable[[int, int, list[tuple[int, LossScale, float]], Culprits], None] | None = None
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
        tell = self._listeners.skipped

        def report(before: int, now: int, losses: list[tuple[int, LossScale, float]], culprits: Culprits = ()) -> None:
            scales.extend((loss_id, value) for loss_id, _, value in losses)
            if tell is not None:
                tell(before, now, losses, culprits)

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

    def skip_counts(self, optimizer: Any, flags: Flags) -> SkipCounts | None:
        """Counts for an optimizer whose step counts itself, or None. No host sync."""
        found_inf = getattr(optimizer, "found_inf", None)
        if not self._counts_on_device or not isinstance(found_inf, Tensor) or torch.compiler.is_compiling():
            return None
        return self._on_device.offer(found_inf, flags) if declares(optimizer, "_step_counts_skips") else None

    def left_to_device(
        self,
        optimizer: Any,
        flags: Flags,
        known: Known,
        found_inf: Tensor | None,
        culprits: Callable[[], Culprits],
        later: Callable[[int], Culprits | None],
        external: bool = False,
        counts: SkipCounts | None = None,
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
