"""Skipped steps in the log, and messages that are said once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container
from typing import Any

from ampctx._collectives import is_rank_zero
from ampctx._errors import listed, warn
from ampctx.scaling.loss_scale import LossScale
from ampctx.scaling.outcome import Culprits
from ampctx.scaling.step_record import OUTSIDE_OF_BLOCKS, is_to_tell

logger = logging.getLogger("ampctx")


class SkipLog:
    """Logs skipped steps and warnings, on rank 0. ``deferred``: scales that a later block updates."""

    def __init__(self, deferred: Container[LossScale]) -> None:
        self.verbosity, self._deferred = 1, deferred
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
        """Logs skipped steps when the host learns of them. ``before``, ``skipped``: the number of skips at the last
        report and now. ``losses``: those that overflowed, with the scale's value then. ``steps``: all of them."""
        if is_to_tell(before, skipped):
            self._log(skipped, losses, culprits)
        for _, scale, value in losses:
            # Some bad batches. Where most steps are skipped, the log of skips says what to look for.
            if scale.moves and value < 1.0 and not scale.min_scale and 2 * skipped < steps:
                self.say(
                    "small scale",
                    f"ampctx: the loss scale fell to {value}, after {skipped} skips in {steps} steps. Below 1 it turns "
                    "small gradients into 0. Pass amp.initialize(min_loss_scale=1.0), and find the bad batches with "
                    "amp.outcome(optimizer).culprits. See `ampctx explain loss-is-nan`.",
                    logger.warning,  # which never raises, as a filter of warnings may: the step is not recorded yet
                )

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
                "model or its input. See `ampctx explain loss-is-nan`."
            )
        elif skipped > 8:
            logger.warning("ampctx: %d steps skipped so far", skipped)
