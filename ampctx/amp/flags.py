"""``found_inf`` of each loss of one optimizer since its last step."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from ampctx.kernels.foreach import Factor
from ampctx.scaling.loss_scale import LossScale
from ampctx.scaling.step_record import OUTSIDE_OF_BLOCKS, Flags
from ampctx.weights.waiting import Waiting


class FoundInfFlags:
    """By loss, its scale and a 0-d flag on the device.

    Attributes:
        by_loss: decides about the next step. It stays set until then, even if later backwards are clean.
        scales_used: the factors of the losses.
        of_failed_step: a step raised. The flags stay for a second try, until the gradients are zeroed.
    """

    def __init__(self) -> None:
        self.by_loss: Flags = {}
        # The final ones among them: ``drop_provisional`` leaves them.
        self._final: Flags = {}
        self.scales_used: dict[int, Factor] = {}
        self.of_failed_step = False
        # The flags of a running step.
        self._taken: tuple[Flags, Flags] | None = None
        # The flag of the latest block while ranks have yet to agree on it.
        self._undecided: Waiting | None = None

    @property
    def has_failed(self) -> bool:
        return self.of_failed_step or (self._undecided is not None and self._undecided.failed)

    @property
    def are_of_blocks(self) -> bool:
        """Whether a block has checked gradients since the last step."""
        return self._undecided is not None or any(loss_id != OUTSIDE_OF_BLOCKS for loss_id in self.by_loss)

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

    def wait(self, loss_id: int, scale: LossScale, found_inf: Tensor, groups: list[Any], session: Any) -> None:
        """Leaves a flag, and the update of its scale, to the next call that reduces over the process groups. The flag
        is final then. No host sync."""
        reference = weakref.ref(self)

        def conclude(flag: Waiting, agreed: Tensor) -> None:
            if (flags := reference()) is not None:
                flags._undecided = None
                flags.add(loss_id, scale, agreed)
            if flag.moves_scale:
                scale.update(agreed)

        self._undecided = Waiting(session, scale, found_inf, groups, conclude)

    def decide(self, call: str) -> None:
        """Lets ranks agree on a flag that waits, see ``Waiting.decide``."""
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
