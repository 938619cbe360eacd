"""Stops a run that skips too many steps in a row, with a diagnosis."""

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
    """The error for more than ``limit`` skips in a row. ``scales``: (loss id, scale after a skip), the latest last."""
    culprits = outcome.culprits
    several = len({loss_id for loss_id, _ in scales}) > 1
    course = ", ".join(f"loss {i}: {value}" if several else str(value) for i, value in scales)
    return AmpStallError(
        f"{in_a_row} steps of {optimizer} in a row were skipped (max_consecutive_skips={limit}). Weights are "
        f"unchanged. Non-finite gradients: {listed(culprits, 8) if culprits else 'not known'}. Loss scale after skips: "
        f"{course or 'not known'}. If the scale is far down, scaling is not the cause: check input, loss and weights "
        "for inf and nan (torch.autograd.set_detect_anomaly names the op), keep these layers in fp32, use bfloat16 "
        "(opt_level O4 or O5), or lower the learning rate. At the start of a run, begin with a smaller scale or allow "
        "more skips. See docs/errors.md#the-loss-scale-goes-to-0-or-the-loss-is-nan.",
        outcome=outcome,
        scale_history=list(scales),
    )
