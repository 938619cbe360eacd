"""The latest steps of an optimizer as plain lists, for plots and logs.

What a step leaves on the device stays there until somebody asks: a few tensors of one element, gathered into one tensor
every so many steps.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampctx.kernels.foreach import move
from ampctx.scaling.loss_scale import check_count
from ampctx.scaling.outcome import Number, StepOutcome, gathered

DEFAULT_LENGTH = 10_000
# Steps that keep tensors of their own.
GATHERED_AT_ONCE = 64


class History(NamedTuple):
    """Steps of one optimizer, the oldest first: lists of Python numbers, all of one length.

    Attributes:
        step: the number of the step. That of the first one after ``initialize`` is 0.
        skipped: whether it was skipped.
        grad_norm: ``StepOutcome.grad_norm`` in fp32; nan where nobody took it.
        scale: by loss id, what the loss was multiplied by; nan where it took no part in the step.
        overflowed: by loss id, whether its gradients were not finite. -1, where it is there, stands for gradients from
            outside of ``scale_loss`` blocks.
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


def check_length(history: Any) -> int:
    return check_count("history", history, 0)


class _Gathered(NamedTuple):
    """Some steps. Numbers that are None in ``steps`` are those in ``on_device``, in order."""

    steps: list[dict[Number, float | None]]
    on_device: Tensor


class StepHistory:
    """What became of the latest steps of one optimizer.

    Args:
        length: how many of them are kept; 0 for none.
        losses: how many loss ids there are.
    """

    def __init__(self, length: int, losses: int = 1) -> None:
        self._length = length
        self._losses = losses
        self._count = 0
        self._read: deque[dict[Number, float]] = deque(maxlen=length)
        self._gathered: deque[_Gathered] = deque()
        self._latest: list[dict[Number, Tensor | float]] = []

    def add(self, outcome: StepOutcome) -> None:
        """Takes what became of a step. No host sync."""
        if not self._length:
            return
        self._count += 1
        self._latest.append(outcome.numbers())
        if len(self._latest) == GATHERED_AT_ONCE:
            self._gather()
            while sum(len(some.steps) for some in self._gathered) - len(self._gathered[0].steps) >= self._length:
                self._gathered.popleft()

    def _gather(self) -> None:
        steps, self._latest = self._latest, []
        tensors = [value for step in steps for value in step.values() if isinstance(value, Tensor)]
        numbers = [{key: None if isinstance(v, Tensor) else v for key, v in step.items()} for step in steps]
        self._gathered.append(_Gathered(numbers, gathered(tensors)))

    def lists(self, last: int | None = None) -> History:
        """The latest steps, ``last`` of them or all that are kept. A host sync."""
        n = self._length if last is None else check_count("last", last, 0)
        self._gather()
        parts = [some.on_device for some in self._gathered]
        device = next((part.device for part in parts if part.device.type != "cpu"), torch.device("cpu"))
        values = iter(torch.cat([move(part, device) for part in parts]).tolist())
        for step in [step for some in self._gathered for step in some.steps]:
            self._read.append({key: next(values) if value is None else value for key, value in step.items()})
        self._gathered.clear()
        steps = list(self._read)[max(0, len(self._read) - n) :]
        losses = range(self._losses)
        checked = sorted({i for step in steps for name, i in step if name == "overflowed"}.union(losses))
        nan = float("nan")
        return History(
            step=list(range(self._count - len(steps), self._count)),
            skipped=[any(step[k] for k in step if k[0] in ("overflowed", "found_inf")) for step in steps],
            grad_norm=[step.get(("grad_norm", 0), nan) for step in steps],
            scale={i: [step.get(("scale", i), nan) for step in steps] for i in losses},
            overflowed={i: [bool(step.get(("overflowed", i), 0.0)) for step in steps] for i in checked},
        )
