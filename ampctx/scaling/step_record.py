"""Decides whether the steps of an optimizer run or are skipped after an overflow, and records them.

amp and ``GradScaler`` have one ``StepRecord`` for each optimizer, and call it in the order of a step:

    overflowed(flags)                                 the host decides, and reads the flags. Or the device decides,
    record.overflowed_at_limit(flags)                     unless one more skip in a row would exceed the limit
    record.counts_for(found_inf, flags)               numbers for an optimizer that counts its skips itself
    record.left_to_device(...), record.conclude(...)  records what the device decided: outcome, counts, history, hooks
    record.stepped(...), record.skipped(...)          records what the host decided
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampctx._errors import AmpStallError, listed
from ampctx.kernels import ops
from ampctx.kernels.foreach import join_flags, move
from ampctx.kernels.reference import skip_counts
from ampctx.scaling.any_optimizer import with_wrapped
from ampctx.scaling.loss_scale import LossScale
from ampctx.scaling.outcome import Culprits, StepHistory, StepOutcome, gathered
from ampctx.weights.step import SkipCounts

# The loss id of gradients that no block has checked.
OUTSIDE_OF_BLOCKS = -1
# Per loss id, its scale and a 0-d flag.
Flags = dict[int, tuple[LossScale, Tensor]]
Overflowed = list[tuple[int, LossScale]]


def host_may_read() -> bool:
    """Whether the host may read the device. Not while a CUDA graph is captured."""
    return not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


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


class StepRecord:
    """Decides and records the steps of one optimizer, without a reference to it.

    The device counts the steps that it skips. Asynchronous copies, one at a time, bring the counts to the host.

    Args:
        limit: the number of steps that may be skipped in a row. None: any number.
        history_length, losses: the number of steps that the history keeps, and of loss ids.
        report: gets the numbers of skips at the last report and now, (loss id, scale, value) of each loss that
            overflowed, the parameters with non-finite gradients, and the number of steps so far. None: skips on the
            device are counted only for a limit.
        hooks: those of steps that ran, and those of skipped ones. Each gets the optimizer and the outcome.

    ``outcome``: of the latest step, None before the first. ``epoch``: counts calls that may change the gradients in
    ``.grad`` after a step. ``in_a_row``: the skips in a row that the host knows of. ``told``: has warned.
    """

    def __init__(
        self,
        limit: int | None,
        history_length: int,
        losses: int = 1,
        report: Callable[..., None] | None = None,
        hooks: tuple[Mapping[int, Callable], Mapping[int, Callable]] = ({}, {}),
    ) -> None:
        self.outcome: StepOutcome | None = None
        self.history = StepHistory(history_length, losses)
        self.epoch, self.in_a_row, self.told = 0, 0, False
        self._limit, self._report, self._hooks = limit, report, hooks
        self._counts_skips = limit is not None or report is not None
        self._skipped_on_host = 0
        # (Loss id, scale after a skip), as far as the host knows.
        self._scales_after = deque[tuple[int, float]](maxlen=16)
        # Those of ``ops.count_skip``, on the device of the flags. It has all slots from the beginning, so that a
        # replay counts where later steps count. The last slot is that of OUTSIDE_OF_BLOCKS.
        self._counts: Tensor | None = None
        self._slots = losses + 1
        self._scales: dict[int, LossScale] = {}
        # The loss id of the latest ``counts_for``, and what it gave.
        self._offered: tuple[int, SkipCounts] | None = None
        # The counts that were reported: of all skips, and of each loss.
        self._reported, self._reported_of = 0, defaultdict[int, float](float)
        # Counts on their way to the host.
        self._copy: tuple[Tensor, torch.cuda.Event | None] | None = None

    # --- before the step ----------------------------------------------------------------------------------------------

    def overflowed_at_limit(self, flags: Callable[[], Flags]) -> Overflowed:
        """The losses that overflowed, if one more skip in a row would exceed the limit. Otherwise [], and the device
        decides. Host sync only at the limit."""
        if self._limit is None:
            return []
        if host_may_read():
            self._poll()
        if self.in_a_row < self._limit:
            return []
        if not (found := overflowed(flags())):
            self._decided(skipped=False)
        return found

    def counts_for(self, found_inf: Tensor | None, flags: Flags) -> SkipCounts | None:
        """Counts for an optimizer that counts its steps itself. None unless ``found_inf`` is the flag of one loss, with
        a scale on its device. No host sync."""
        if not self._counts_skips or found_inf is None or len(flags) != 1 or torch.compiler.is_compiling():
            return None
        ((loss_id, (scale, flag)),) = flags.items()
        value, kept = scale.scale, self._offered
        if flag is not found_inf or value is None or value.device != found_inf.device:
            return None
        if kept is None or kept[0] != loss_id or kept[1].tensors[4] is not value:
            counts, slot = self._counts_and_slot(loss_id, scale, found_inf.device)
            if value.device != counts.device:
                return None
            kept = self._offered = loss_id, SkipCounts([*skip_counts(counts, slot), value])
        if kept[1].found_inf is not found_inf:
            kept[1].found_inf, kept[1].is_taken = found_inf, False
        return kept[1]

    # --- after a step that the device decided on ----------------------------------------------------------------------

    def left_to_device(
        self,
        flags: Flags,
        known: Known,
        found_inf: Tensor | None,
        culprits: Callable[[], Culprits],
        later: Callable[[bool], Culprits | None],
        external: bool = False,
        counts: SkipCounts | None = None,
    ) -> StepOutcome:
        """Makes the outcome of a step, and counts it. The caller gives it to ``conclude``. Host sync only with hooks.

        ``found_inf``: the flag that the step used. ``external``: it includes a flag that no loss has raised.
        ``culprits``, ``later``: give the parameters with non-finite gradients now, or later: then with whether
        ``.grad`` still belongs to this step. ``counts``: those that the step was offered.
        """
        epoch, record = self.epoch, weakref.ref(self)
        outcome = StepOutcome(
            {loss_id: flag for loss_id, (_, flag) in flags.items()},
            external=found_inf if external else None,
            scales=known.scales,
            grad_norm=known.grad_norm,
            culprits=lambda: later((now := record()) is not None and now.epoch == epoch),
        )
        if any(self._hooks) and host_may_read() and outcome.skipped:
            outcome.name(culprits())
        if flags and found_inf is not None and self._counts_skips and not (counts and counts.is_taken):
            for i, (loss_id, (scale, flag)) in enumerate(flags.items()):
                numbers, slot = self._counts_and_slot(loss_id, scale, found_inf.device)
                device = numbers.device
                found, raised, value = (move(t, device) for t in (found_inf, flag, scale.tensors(device)[0]))
                ops.count_skip(numbers, found, raised, value, slot, is_first=i == 0)
        return outcome

    def conclude(self, optimizer: Any, outcome: StepOutcome) -> None:
        """Ends a step: history and hooks."""
        self.outcome = outcome
        if not host_may_read():
            return
        self._poll()
        self.history.add(outcome)
        if any(self._hooks):
            for hook in list(self._hooks[outcome.skipped].values()):
                hook(optimizer, outcome)

    # --- after a step that the host decided on ------------------------------------------------------------------------

    def stepped(self, optimizer: Any, known: Known) -> None:
        """Records a step that ran."""
        self._decided(skipped=False)
        self.conclude(optimizer, StepOutcome(scales=known.scales, grad_norm=known.grad_norm))

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
        values = [(loss_id, scale, scale.value()) for loss_id, scale in losses] if self._counts_skips else []
        self._tell(self._skipped_on_host - 1, self._skipped_on_host, values, culprits)
        ids = [loss_id for loss_id, _ in losses]
        outcome = StepOutcome(ids, scales=known.scales, grad_norm=known.grad_norm, culprits=culprits)
        self._decided(skipped=True)
        self.conclude(optimizer, outcome)
        if self._limit is not None and self.in_a_row > self._limit:
            raise self._stalled(type(optimizer).__name__, outcome, culprits)

    def _stalled(self, optimizer: str, outcome: StepOutcome, culprits: Culprits) -> AmpStallError:
        several = len({loss_id for loss_id, _ in self._scales_after}) > 1
        course = ", ".join(f"loss {i}: {value}" if several else str(value) for i, value in self._scales_after)
        return AmpStallError(
            f"{self.in_a_row} steps of {optimizer} in a row were skipped (max_consecutive_skips={self._limit}). "
            f"Weights are unchanged. Non-finite gradients: {listed(culprits, 8) if culprits else 'not known'}. Loss "
            f"scale after skips: {course or 'not known'}. If "
            "the scale is far down, scaling is not the cause: check input, loss and weights for inf and nan "
            "(torch.autograd.set_detect_anomaly names the op), keep these layers in fp32, use bfloat16 (opt_level O4 "
            "or O5), or lower the learning rate. At the start of a run, begin with a smaller scale or allow more "
            "skips. See docs/errors.md#the-loss-scale-goes-to-0-or-the-loss-is-nan.",
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

    def _decided(self, skipped: bool) -> None:
        """Counts a decision of the host in the skips in a row. No host sync."""
        if self._limit is None:
            return
        self._copy = None  # the one on its way does not include this step
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        if self._counts is not None:
            self._counts[1].fill_(self.in_a_row)

    def _poll(self) -> None:
        """Reads counts that have arrived, and starts the next copy. No host sync."""
        if self._counts is None:
            return
        numbers, event = self._copy = self._copy or _copied(self._counts)
        if event is None or event.query():
            self._copy = None
            if (values := numbers.tolist())[:2] != [self._reported, self.in_a_row]:
                self._read(values)

    def _read(self, counts: list[float]) -> None:
        """Takes over counts, and reports new skips."""
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


def _copied(counts: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Counts on their way to the host, and the event of their arrival. None: they are there."""
    if not counts.is_cuda:
        return counts.cpu(), None
    numbers = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
    numbers.copy_(counts, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(counts.device))
    return numbers, event
