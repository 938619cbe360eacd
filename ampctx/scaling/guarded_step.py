"""The steps of one optimizer that an overflow skips: what decides, who decides, and what is kept of each step.

amp and ``GradScaler`` have one ``GuardedStep`` for each optimizer, and call it in this order:

    decide   read the flags (``overflowed``), or leave them to the device unless ``overflowed_instead_of_device``
    act      take the step, skip it, or have the optimizer decide
    record   ``stepped``, ``skipped`` or ``left_to_device``: outcome, history, counts of skips, and who listens
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampctx.kernels.foreach import Factor, join_flags
from ampctx.scaling.device_skips import DeviceSkips, Flags, is_capturing
from ampctx.scaling.history import StepHistory
from ampctx.scaling.loss_scale import LossScale
from ampctx.scaling.outcome import Culprits, StepOutcome, gathered
from ampctx.scaling.stall import stall_error
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
        # Those among them that nobody else will decide about.
        self._final: Flags = {}
        # What the losses were multiplied by.
        self.scales_used: dict[int, Factor] = {}
        # A step raised: the flags are for trying it again, and go with the gradients.
        self.of_failed_step = False
        # What a step goes by that is under way.
        self._taken: tuple[Flags, Flags] | None = None

    def add(self, loss_id: int, scale: LossScale, found_inf: Tensor, final: bool = True) -> None:
        """ORs a flag in. ``final``: nobody else decides about it, and ``drop_provisional`` leaves it. No host sync."""
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

    @property
    def are_of_blocks(self) -> bool:
        """Whether a block has checked gradients since the last step."""
        return any(loss_id != OUTSIDE_OF_BLOCKS for loss_id in self.by_loss)

    def replace(self, by_loss: Flags, scales_used: dict[int, Factor]) -> None:
        """Takes over those of a checkpoint."""
        self.clear()
        self.by_loss, self.scales_used = by_loss, scales_used

    def clear(self) -> None:
        self._taken = None
        self.by_loss, self._final, self.of_failed_step = {}, {}, False

    def take(self) -> Flags:
        """The flags since the last step, for the one decision that they are for."""
        taken = self.by_loss, self._final
        self.clear()
        self._taken = taken
        return taken[0]

    def settle(self) -> None:
        """Ends the step that has taken flags: their gradients have been used or dropped."""
        self._taken = None

    def give_back(self) -> None:
        """A step raised before it was settled: its gradients are there still, and so are their flags."""
        if self._taken is not None:
            self.by_loss, self._final = (
                {**flags, **now} for flags, now in zip(self._taken, (self.by_loss, self._final), strict=True)
            )
            self._taken = None
        # Of a block that came before a step, too: the gradients are to be zeroed, and it goes with them.
        self.of_failed_step = True

    def take_scales(self) -> dict[int, Factor]:
        scales, self.scales_used = self.scales_used, {}
        return scales


def overflowed(flags: Flags) -> Overflowed:
    """The losses whose gradients overflowed. A host sync, and a second one to tell which of several losses it was."""
    if not flags:
        return []
    each = [flag for _, flag in flags.values()]
    if join_flags(each, each[0].device).item() == 0:
        return []
    values = gathered(each).tolist() if len(each) > 1 else [1.0]
    return [(loss_id, scale) for (loss_id, (scale, _)), value in zip(flags.items(), values, strict=True) if value]


class Known(NamedTuple):
    """What is known of a step besides its flags."""

    scales: dict[int, Any]
    grad_norm: Tensor | None


class Listeners(NamedTuple):
    """Who is told of steps.

    skipped: with the number of skips at the last report and now, id, scale and its value for each loss that overflowed,
        and what is known of whose gradients did. None: nobody, and skips on the device are counted for a limit alone.
    stepped: with the optimizer and the outcome of every step, while one of ``hooks`` has anything in it.
    """

    skipped: Callable[[int, int, list[tuple[int, LossScale, float]], Culprits], None] | None = None
    stepped: Callable[[Any, StepOutcome], None] | None = None
    hooks: tuple[Collection[Any], ...] = ()


class GuardedStep:
    """The steps of one optimizer, which it does not refer to.

    Args:
        limit: how many may be skipped in a row. None: any number.
        history_length: how many the history keeps.
        losses: how many loss ids there are.
        listeners: who is told.

    ``outcome`` is that of the latest step, None before the first. ``epoch`` counts what may change the gradients that a
    step has left in ``.grad``.
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
        # Loss id and scale after a skip, as far as the host was told.
        self._scales = scales = deque[tuple[int, float]](maxlen=16)
        tell = self._listeners.skipped

        def report(before: int, now: int, losses: list[tuple[int, LossScale, float]], culprits: Culprits = ()) -> None:
            scales.extend((loss_id, value) for loss_id, _, value in losses)
            if tell is not None:
                tell(before, now, losses, culprits)

        self._report = report
        self._on_device = DeviceSkips(report, in_a_row=limit is not None)

    def skipped_steps(self) -> int:
        """A host sync where the device decides."""
        return self._skipped_on_host + self._on_device.total()

    # --- decide -------------------------------------------------------------------------------------------------------

    def overflowed_instead_of_device(self, flags: Callable[[], Flags]) -> Overflowed:
        """The losses that overflowed, once so many skips in a row are known that one more is too many; none before:
        the device decides then. No host sync until then."""
        if self._limit is None:
            return []
        self._on_device.poll()
        if self._on_device.in_a_row < self._limit:
            return []
        if not (found := overflowed(flags())):
            self._on_device.decided_on_host(skipped=False)
        return found

    # --- record -------------------------------------------------------------------------------------------------------

    def stepped(self, optimizer: Any, known: Known) -> None:
        """A step that the host has decided on, and that was taken."""
        if self._limit is not None:
            self._on_device.decided_on_host(skipped=False)
        self.conclude(optimizer, StepOutcome(scales=known.scales, grad_norm=known.grad_norm), by_device=False)

    def skipped(self, optimizer: Any, losses: Overflowed, known: Known, culprits: Culprits) -> None:
        """A step that the host has not let through.

        Raises:
            AmpStallError: that was one more in a row than the limit.
        """
        self._skipped_on_host += 1
        # torch's LR schedulers warn when they are stepped first; a skipped step was asked for in the right order. The
        # name is private to torch.optim.lr_scheduler and guarded by a test. They may look at what LARC or SAM wraps.
        for one in with_wrapped(optimizer):
            one._opt_called = True
        values = [(loss_id, scale, scale.value()) for loss_id, scale in losses] if self._counts_on_device else []
        self._report(self._skipped_on_host - 1, self._skipped_on_host, values, culprits)
        outcome = StepOutcome(
            [loss_id for loss_id, _ in losses], scales=known.scales, grad_norm=known.grad_norm, culprits=culprits
        )
        if self._limit is not None:
            self._on_device.decided_on_host(skipped=True)
        self.conclude(optimizer, outcome, by_device=False)
        if self._limit is not None and self._on_device.in_a_row > self._limit:
            raise stall_error(type(optimizer).__name__, outcome, self._on_device.in_a_row, self._limit, self._scales)

    def left_to_device(
        self,
        optimizer: Any,
        flags: Flags,
        known: Known,
        found_inf: Tensor | None,
        culprits: Callable[[], Culprits],
        later: Callable[[int], Culprits | None],
        external: bool = False,
    ) -> StepOutcome:
        """The outcome of a step that the device has decided on, for ``conclude``. No host sync, unless a hook listens.

        Args:
            found_inf: what the step went by.
            culprits, later: whose gradients were not finite, now, or later with the ``epoch`` of the step.
            external: whether a flag took part that no loss has raised.
        """
        epoch = self.epoch
        outcome = StepOutcome(
            {loss_id: flag for loss_id, (_, flag) in flags.items()},
            external=found_inf if external else None,
            scales=known.scales,
            grad_norm=known.grad_norm,
            culprits=lambda: later(epoch),
        )
        listens = self._listeners.stepped is not None and any(self._listeners.hooks)
        if listens and not is_capturing() and outcome.skipped:
            outcome.name(culprits())
        if flags and found_inf is not None and self._counts_on_device:
            self._on_device.count(found_inf, flags)
        return outcome

    def conclude(self, optimizer: Any, outcome: StepOutcome, by_device: bool = True) -> None:
        """Ends a step, ``by_device`` one that was ``left_to_device``."""
        if by_device and self._counts_on_device:
            self._on_device.poll()
        self.outcome = outcome
        if is_capturing():
            return
        self.history.add(outcome)
        if self._listeners.stepped is not None and any(self._listeners.hooks):
            self._listeners.stepped(optimizer, outcome)
