"""What happens in a training loop: calls of observers (``hints``), and skipped steps in the log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any

from ampctx._collectives import is_rank_zero
from ampctx._decorators import outside_of_graphs
from ampctx._errors import listed, warn
from ampctx.scaling.loss_scale import LossScale
from ampctx.scaling.step_record import OUTSIDE_OF_BLOCKS, Culprits, is_to_tell

logger = logging.getLogger("ampctx")


@dataclass(eq=False)
class Events:
    """The listeners of each event of one session, by what they are called with.

    entered, left: (block, the loss times the scale): a block whose scale is not 1 begins, or is about to unscale its
    gradients. stepping: (binding): a step, or each evaluation of its closure, is about to use its gradients, which are
    unscaled. skipped: (scale, min_scale, skipped steps of the optimizer, all its steps): the host learns that a loss
    with a moving scale overflowed. dropped: (binding, names of parameters that joined it with a gradient of unknown
    scale, which is gone). written: (binding, names of weights that were written through ``.data``)."""

    entered: list[Callable[..., None]] = field(default_factory=list)
    left: list[Callable[..., None]] = field(default_factory=list)
    stepping: list[Callable[..., None]] = field(default_factory=list)
    skipped: list[Callable[..., None]] = field(default_factory=list)
    dropped: list[Callable[..., None]] = field(default_factory=list)
    written: list[Callable[..., None]] = field(default_factory=list)


@outside_of_graphs
def tell(listeners: list[Callable[..., None]], *facts: Any) -> None:
    for listener in tuple(listeners):  # one may take itself off
        listener(*facts)


class SkipLog:
    """Logs skipped steps and warnings, on rank 0. ``deferred``: scales that a later block updates."""

    def __init__(self, deferred: Container[LossScale], events: Events) -> None:
        self.verbosity, self._deferred, self._events = 1, deferred, events
        self._explained_skips, self.said = False, set[Any]()

    def say(self, kind: Any, message: str, tell: Callable[[str], object] = warn) -> None:
        """Warns, or tells otherwise, if it is the first message of its kind in a run."""
        if kind not in self.said:
            self.said.add(kind)
            if self.verbosity > 0 and is_rank_zero():
                tell(message)

    def report(
        self, before: int, skipped: int, losses: list[tuple[int, LossScale, float]], culprits: Culprits, steps: int
    ) -> None:
        """Logs skipped steps, and tells observers, when the host learns of them. ``before``, ``skipped``: the number of
        skips at the last report and now. ``losses``: those that overflowed, with the scale's value then."""
        if is_to_tell(before, skipped):
            self._log(skipped, losses, culprits)
        for _, scale, value in losses if self._events.skipped else ():
            if scale.moves:
                tell(self._events.skipped, value, scale.min_scale, skipped, steps)

    def _log(self, skipped: int, losses: list[tuple[int, LossScale, float]], culprits: Culprits) -> None:
        if self.verbosity <= 0 or not is_rank_zero():
            return
        for loss_id, scale, value in losses:
            course = f"loss scaler {loss_id} reducing loss scale to {value}"
            if loss_id == OUTSIDE_OF_BLOCKS or scale in self._deferred:
                course = f"the loss scale stays at {value} for now"
            elif not scale.moves:
                course = f"the loss scale stays at {value}"
            logger.warning("Gradient overflow.  Skipping step, %s", course)
        if culprits and (skipped > 8 or not self._explained_skips):
            logger.warning("ampctx: non-finite gradients: %s", listed(culprits))
        if not self._explained_skips:
            self._explained_skips = True
            logger.warning(
                "ampctx: a few skipped steps are normal. The loss scale starts high and falls until gradients fit. "
                "If skips go on, check that each iteration calls optimizer.zero_grad(), and look for inf or nan in the "
                "model or its input. See docs/errors.md#the-loss-scale-goes-to-0-or-the-loss-is-nan."
            )
        elif skipped > 8:
            logger.warning("ampctx: %d steps skipped so far", skipped)
