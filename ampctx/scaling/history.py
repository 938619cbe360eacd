"""The latest steps of an optimizer as plain lists, for plots and logs.

Each step leaves a few one-element tensors on the device. Every ``GATHERED_AT_ONCE`` steps they become one tensor. Only
``lists`` reads them.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from ampctx.kernels.foreach import move
from ampctx.scaling.loss_scale import check_count
from ampctx.scaling.outcome import Number, StepOutcome, gathered

DEFAULT_LENGTH = 10_000
# Steps before their tensors are gathered into one.
GATHERED_AT_ONCE = 64


class History(NamedTuple):
    """Steps of one optimizer, the oldest first, as lists of Python numbers of equal length.

    Attributes:
        step: the number of the step. The first one after ``initialize`` is 0.
        skipped: whether the step was skipped.
        grad_norm: ``StepOutcome.grad_norm`` in fp32; nan if no call computed it.
        scale: by loss id, the scale of the loss; nan if the loss had no part in the step.
        overflowed: by loss id, whether gradients were inf or nan. The loss id -1 means gradients from outside of
            ``scale_loss`` blocks.
    """

    step: list[int]
    skipped: list[bool]
    grad_norm: list[float]
    scale: dict[int, list[float]]
    overflowed: dict[int, list[bool]]

    def __str__(self) -> str:
        """The number of steps and of skips, and the latest norm and scales. ``repr`` shows the lists."""
        if not self.step:
            return "no steps"
        scales = ", ".join(f"{values[-1]:g}" for values in self.scale.values())
        return (
            f"steps {self.step[0]} to {self.step[-1]}, {sum(self.skipped)} skipped; "
            f"latest gradient norm {self.grad_norm[-1]:g}, loss scale {scales}"
        )


class StepHistory:
    """The outcomes of the latest steps of one optimizer.

    Args:
        length: the number of steps to keep; 0 for none.
        losses: the number of loss ids. ``count``: of steps so far, kept or not.
    """

    def __init__(self, length: int, losses: int = 1) -> None:
        self.count, self._length, self._losses = 0, length, losses
        self._latest: list[dict[Number, Tensor | float]] = []
        self._gathered = deque[_Steps](maxlen=-(-length // GATHERED_AT_ONCE))

    def add(self, outcome: StepOutcome) -> None:
        """Adds the outcome of a step. No host sync."""
        self.count += 1
        if self._length:
            self._latest.append(outcome.numbers)
        if len(self._latest) == GATHERED_AT_ONCE:
            self._gathered.append(_gather(self._latest))
            self._latest = []

    def lists(self, last: int | None = None) -> History:
        """The latest ``last`` steps, or all that are kept. Host sync."""
        n = self._length if last is None else min(check_count("last", last, 0), self._length)
        parts = [*self._gathered, _gather(self._latest)]
        device = next((part.device for _, part in parts if part.device.type != "cpu"), torch.device("cpu"))
        values = iter(torch.cat([move(part, device) for _, part in parts]).tolist())
        read = [{k: next(values) if v is None else v for k, v in step.items()} for steps, _ in parts for step in steps]
        steps = read[max(0, len(read) - n) :]
        losses = range(self._losses)
        checked = sorted({i for step in steps for name, i in step if name == "overflowed"}.union(losses))
        nan = float("nan")
        return History(
            step=list(range(self.count - len(steps), self.count)),
            skipped=[any(step[k] for k in step if k[0] in ("overflowed", "found_inf")) for step in steps],
            grad_norm=[step.get(("grad_norm", 0), nan) for step in steps],
            scale={i: [step.get(("scale", i), nan) for step in steps] for i in losses},
            overflowed={i: [bool(step.get(("overflowed", i), 0.0)) for step in steps] for i in checked},
        )


# Steps, in which None stands for a number on the device, and these numbers in order.
_Steps = tuple[list[dict[Number, float | None]], Tensor]


def _gather(steps: list[dict[Number, Tensor | float]]) -> _Steps:
    tensors = [value for step in steps for value in step.values() if isinstance(value, Tensor)]
    return [{k: None if isinstance(v, Tensor) else v for k, v in step.items()} for step in steps], gathered(tensors)
