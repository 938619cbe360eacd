"""The record of an optimizer's steps, which decides about skips after an overflow, and the flags that it goes by.

amp, ``GradScaler`` and guards have one ``StepRecord`` for each optimizer, and call it in the order of a step:

    overflowed(flags)                                 the host decides, and reads the flags. Or the device decides,
    record.overflowed_at_limit(flags)                     unless one more skip in a row would exceed the limit
    record.counts_for(found_inf, flags)               numbers for an optimizer that counts its skips itself
    record.left_to_device(...), record.conclude(...)  records what the device decided: outcome, counts, history, hooks
    record.decided(...)                               records what the host decided
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ampctx._decorators import arriving, host_may_read
from ampctx._errors import AmpStallError, listed
from ampctx.kernels import ops
from ampctx.kernels.foreach import Factor, move
from ampctx.kernels.reference import skip_counts
from ampctx.kernels.tensor_loops import is_fake
from ampctx.scaling.any_optimizer import with_wrapped
from ampctx.scaling.loss_scale import LossScale
from ampctx.scaling.outcome import NO_STEP_YET, Culprits, StepHistory, StepOutcome, gathered

# --- the record -------------------------------------------------------------------------------------------------------

# The loss id of gradients that no block has checked.
OUTSIDE_OF_BLOCKS = -1
# Per loss id, its scale and a 0-d flag.
Flags = dict[int, tuple[LossScale, Tensor]]
Overflowed = list[tuple[int, LossScale]]
# Per loss id, the scale of its block.
Scales = Mapping[int, Factor | Tensor]


def is_to_tell(before: int, skipped: int) -> bool:
    """Whether skips are logged: the first eight, then powers of two, so that a run that overflows forever does not fill
    the log."""
    return skipped <= 8 or skipped.bit_length() != before.bit_length()


def overflowed(flags: Flags) -> Overflowed:
    """The losses whose gradients overflowed. One host sync."""
    each = [flag for _, flag in flags.values()]
    if any(map(is_fake, each)):
        return []
    values = gathered(each).tolist() if len(each) > 1 else [flag.item() for flag in each]
    return [(loss_id, scale) for (loss_id, (scale, _)), value in zip(flags.items(), values, strict=True) if value]


class FoundInfFlags:
    """``found_inf`` of each loss of one optimizer since its last step: by loss, its scale and a 0-d flag on the device.

    ``by_loss`` decides about the next step. It stays set until then, even if later backwards are clean, or until the
    gradients are zeroed. ``_final``: those that ``drop_provisional`` leaves. ``taken``: those of a running step, which
    come back for a second try if it raises; None once it has used or dropped their gradients. ``scales_used``: the
    factors of the losses.
    """

    def __init__(self) -> None:
        self.by_loss: Flags = {}
        self._final: Flags = {}
        self.taken: tuple[Flags, Flags] | None = None
        self.scales_used: dict[int, Factor] = {}

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

    def clear(self) -> None:
        self.by_loss, self._final, self.taken = {}, {}, None

    def take(self) -> Flags:
        """Takes the flags since the last step, to decide about this step."""
        taken = self.by_loss, self._final
        self.clear()
        self.taken = taken
        return taken[0]

    def give_back(self) -> None:
        """Restores the taken flags after a step that raised: its gradients are still there."""
        if self.taken is not None:
            taken, final = self.taken
            self.by_loss, self._final, self.taken = {**taken, **self.by_loss}, {**final, **self._final}, None


class StepRecord:
    """Decides and records the steps of one optimizer, without a reference to it.

    The device counts the steps that it skips. Asynchronous copies, one at a time, bring the counts to the host.

    Args:
        limit: the number of steps that may be skipped in a row. None: any number.
        history_length, losses: the number of steps that the history keeps, and of loss ids.
        report: see ``SkipLog.report``. None: skips on the device are counted only for a limit.
        hooks: those of steps that ran, and those of skipped ones. Each gets the optimizer and the outcome.

    ``outcome``: of the latest step. ``epoch``: counts calls that may change the gradients in ``.grad`` after a step.
    ``in_a_row``: the skips in a row that the host knows of. ``told``: has warned."""

    def __init__(
        self,
        limit: int | None,
        history_length: int,
        losses: int = 1,
        report: Callable[..., None] | None = None,
        hooks: tuple[Mapping[int, Callable], Mapping[int, Callable]] = ({}, {}),
    ) -> None:
        self.outcome = NO_STEP_YET
        self.history = StepHistory(history_length, losses)
        self.epoch, self.in_a_row, self.told = 0, 0, False
        self.limit, self._report, self._hooks = limit, report, hooks
        self._counts_skips = limit is not None or report is not None
        self._skipped_on_host = 0
        # (Loss id, scale after a skip), as far as the host knows.
        self._scales_after = deque[tuple[int, float]](maxlen=16)
        # Those of ``ops.count_skip``, on the device of the flags. It has all slots from the beginning, so that a
        # replay counts where later steps count. The last slot is that of OUTSIDE_OF_BLOCKS.
        self._counts: Tensor | None = None
        self._slots, self._scales = losses + 1, dict[int, LossScale]()
        # The latest ``counts_for``: the loss id, the numbers, the flag of that step, and the list that it got. A step
        # that raised and is tried again has the same flag.
        self._offered: tuple[int, Sequence[Tensor], Tensor, list[Tensor]] | None = None
        # The counts that were reported: of all skips, and of each loss.
        self._reported, self._reported_of = 0, defaultdict[int, float](float)
        # Counts on their way to the host.
        self._copy: tuple[Tensor, torch.cuda.Event | None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_copy": None, "_offered": None}  # events cannot be copied

    # --- before the step ----------------------------------------------------------------------------------------------

    def overflowed_at_limit(self, flags: Flags) -> Overflowed:
        """The losses that overflowed, if one more skip in a row would exceed the limit. Otherwise [], and the device
        decides. Host sync only at the limit."""
        if self.limit is None:
            return []
        if host_may_read():
            self._poll()
        if self.in_a_row < self.limit:
            return []
        if not (found := overflowed(flags)):
            self._count_in_a_row(False)
        return found

    def counts_for(self, found_inf: Tensor | None, flags: Flags) -> list[Tensor] | None:
        """Counts for an optimizer that counts its steps itself. None unless ``found_inf`` is the flag of one loss, with
        a scale on its device. No host sync."""
        if not self._counts_skips or found_inf is None or len(flags) != 1 or torch.compiler.is_compiling():
            return None
        ((loss_id, (scale, flag)),) = flags.items()
        value, kept = scale.scale, self._offered
        if flag is not found_inf or value is None or value.device != found_inf.device:
            return None
        if kept is not None and kept[0] == loss_id and kept[1][4] is value:
            numbers = kept[1]
        else:
            counts, slot = self._counts_and_slot(loss_id, scale, found_inf.device)
            if value.device != counts.device:
                return None
            numbers, kept = [*skip_counts(counts, slot), value], None
        if kept is None or kept[2] is not found_inf:
            kept = self._offered = loss_id, numbers, found_inf, list(numbers)
        return kept[3]

    # --- after a step that the device decided on ----------------------------------------------------------------------

    def left_to_device(
        self,
        flags: Flags,
        scales: Scales,
        grad_norm: Tensor | None,
        found_inf: Tensor | None,
        later: Callable[[bool], Culprits],
        external: bool = False,
        counts: list[Tensor] | None = None,
        now: Callable[[], Culprits] = tuple,
    ) -> StepOutcome:
        """Makes the outcome of a step, and counts it. The caller gives it to ``conclude``. Host sync only with hooks.

        ``found_inf``: the flag that the step used. ``external``: it includes a flag that no loss has raised.
        ``now``, for hooks, and ``later`` give the parameters with non-finite gradients; later with whether ``.grad``
        still belongs to this step. ``counts``: the list that the step was given, empty if it has counted itself."""
        epoch, record = self.epoch, weakref.ref(self)
        outcome = StepOutcome(
            flags,
            external=found_inf if external else None,
            scales=scales,
            grad_norm=grad_norm,
            culprits=lambda: later((of := record()) is not None and of.epoch == epoch),
        )
        if any(self._hooks) and host_may_read() and outcome.skipped:
            outcome._culprits = now()  # found in time
        if flags and found_inf is not None and self._counts_skips and (counts is None or counts):
            for i, (loss_id, (scale, flag)) in enumerate(flags.items()):
                numbers, slot = self._counts_and_slot(loss_id, scale, found_inf.device)
                device = numbers.device
                found, raised, value = (move(t, device) for t in (found_inf, flag, scale.tensors(device)[0]))
                ops.count_skip(numbers, found, raised, value, slot, is_first=i == 0)
        return outcome

    def conclude(self, optimizer: Any, outcome: StepOutcome) -> None:
        self.outcome = outcome
        if not host_may_read():
            return
        self._poll()
        self.history.add(outcome)
        if any(self._hooks):
            for hook in list(self._hooks[outcome.skipped].values()):
                hook(optimizer, outcome)

    # --- after a step that the host decided on ------------------------------------------------------------------------

    def decided(
        self, optimizer: Any, losses: Overflowed, scales: Scales, grad_norm: Tensor | None, culprits: Culprits = ()
    ) -> None:
        """Records a step that ran, or that ``losses`` skip. AmpStallError: one skip too many in a row."""
        if losses:
            self._skipped_on_host += 1
            # torch's LR schedulers warn if they step before the optimizer. A skipped step came in the right order. The
            # attribute is private to torch.optim.lr_scheduler; a test guards it. Schedulers may use the wrapped one.
            for one in with_wrapped(optimizer):
                one._opt_called = True
            values = [(loss_id, scale, scale.value()) for loss_id, scale in losses] if self._counts_skips else []
            self._tell(self._skipped_on_host - 1, self._skipped_on_host, values, culprits)
        raised = {loss_id: (scale, 1.0) for loss_id, scale in losses}
        outcome = StepOutcome(raised, scales=scales, grad_norm=grad_norm, culprits=culprits)
        self._count_in_a_row(bool(losses))
        self.conclude(optimizer, outcome)
        if self.limit is None or self.in_a_row <= self.limit:
            return
        several = len({loss_id for loss_id, _ in self._scales_after}) > 1
        course = ", ".join(f"loss {i}: {value}" if several else str(value) for i, value in self._scales_after)
        raise AmpStallError(
            f"{self.in_a_row} steps of {type(optimizer).__name__} in a row were skipped "
            f"(max_consecutive_skips={self.limit}). Weights are unchanged. Non-finite gradients: "
            f"{listed(culprits, 8) if culprits else 'not known'}. Loss scale after skips: {course or 'not known'}. If "
            "the scale is far down, scaling is not the cause: check input, loss and weights for inf and nan "
            "(torch.autograd.set_detect_anomaly names the op), keep these layers in fp32, use bfloat16 (opt_level O4 "
            "or O5), or lower the learning rate. At the start of a run, begin with a smaller scale or allow more "
            "skips. See `ampctx explain loss-is-nan`.",
            outcome=outcome,
            scale_history=list(self._scales_after),
        )

    # --- counts of skips ----------------------------------------------------------------------------------------------

    def skipped_steps(self) -> int:
        """The number of skipped steps. Host sync if the device decides."""
        if self._counts is not None:
            self._copy = None
            self._read(self._counts.tolist())
        return self._skipped_on_host + self._reported

    def _counts_and_slot(self, loss_id: int, scale: LossScale, device: torch.device) -> tuple[Tensor, int]:
        """The counts, created on ``device`` if there are none, and the place in them of a loss."""
        if self._counts is None:
            self._counts = torch.zeros(2 + 2 * self._slots, dtype=torch.float32, device=device)
            self._counts[1].fill_(self.in_a_row)
        self._scales[loss_id] = scale
        return self._counts, loss_id % self._slots

    def _count_in_a_row(self, skipped: bool) -> None:
        """Counts a decision of the host. No host sync."""
        if self.limit is None:
            return
        self._copy = None  # the one on its way does not include this step
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        if self._counts is not None:
            self._counts[1].fill_(self.in_a_row)

    def _poll(self) -> None:
        """Reads counts that have arrived, and starts the next copy. No host sync."""
        if type(self._counts) is not Tensor:  # None, or of FakeTensorMode, which has no numbers
            return
        numbers, event = self._copy = self._copy or arriving(self._counts)
        if event is None or event.query():
            self._copy = None
            if (values := numbers.tolist())[:2] != [self._reported, self.in_a_row]:
                self._read(values)

    def _read(self, counts: list[float]) -> None:
        self.in_a_row, before = int(counts[1]), self._reported
        if counts[0] <= before:
            return
        losses = []
        for loss_id, scale in self._scales.items():
            counted, value = counts[2 + 2 * (loss_id % self._slots) :][:2]
            if counted > self._reported_of[loss_id]:
                losses.append((loss_id, scale, value))
                self._reported_of[loss_id] = counted
        self._reported = int(counts[0])
        self._tell(before, self._reported, losses)

    def _tell(self, before: int, now: int, losses: list[tuple[int, LossScale, float]], culprits: Culprits = ()) -> None:
        self._scales_after.extend((loss_id, value) for loss_id, _, value in losses)
        if self._report is not None:
            self._report(before, now, losses, culprits, self.history.count + 1)
