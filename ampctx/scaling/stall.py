"""Stops a run whose steps are skipped one after the other, with a diagnosis."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ampctx._errors import AmpStallError
from ampctx.scaling.loss_scale import check_count
from ampctx.scaling.outcome import StepOutcome, listed


def check_limit(max_consecutive_skips: Any) -> int | None:
    return None if max_consecutive_skips is None else check_count("max_consecutive_skips", max_consecutive_skips, 1)


def stall_error(
    optimizer: str, outcome: StepOutcome, in_a_row: int, limit: int, scales: Collection[tuple[int, float]]
) -> AmpStallError:
    """What one more skip than ``limit`` raises. ``scales``: loss id and scale after skips, the latest last."""
    culprits = outcome.culprits
    several = len({loss_id for loss_id, _ in scales}) > 1
    course = ", ".join(f"loss {i}: {value}" if several else str(value) for i, value in scales)
    return AmpStallError(
        f"{in_a_row} steps of {optimizer} in a row were skipped, and max_consecutive_skips is "
        f"{limit}. Parameters are what they were before. Not finite in the latest: "
        f"{listed(culprits, 8) if culprits else 'not known'}. The loss scale after skips: {course or 'not known'}. "
        "Scaling is not the reason when the scale has come down far: look for inf or nan in the input, the loss "
        "and the weights (torch.autograd.set_detect_anomaly names the op), keep the layers named here in fp32, use "
        "bfloat16 (opt_level O4 or O5), or lower the learning rate. At the very start of a run, begin with a "
        "smaller scale or allow more skips.",
        outcome=outcome,
        scale_history=list(scales),
    )
