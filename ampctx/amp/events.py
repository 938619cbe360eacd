"""What happens in a training loop, as plain facts for observers (``hints``). Built only while somebody listens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from ampctx._compiling import outside_of_graphs
from ampctx.casts.model_watch import ParameterNames


class RunFacts(NamedTuple):
    """An ``initialize``. ``moves``: for each loss id, whether its scale changes. ``warn`` logs a text once."""

    optimizers: list[Any]
    names: ParameterNames
    moves: list[bool]
    warn: Callable[[str], None]


class BlockFacts(NamedTuple):
    """A ``scale_loss`` block over ``optimizers``. ``scaled``: the loss times the scale. ``leaves``: the parameters that
    its backward writes to. ``is_fresh``: none of them has a gradient when it begins, such as one of a delayed block."""

    optimizers: list[Any]
    loss_id: int
    scaled: Tensor
    leaves: list[Tensor]
    is_fresh: bool


class StepFacts(NamedTuple):
    """A step, its gradients unscaled. ``stepped``: ids of the model's parameters that it steps, and of all that have a
    master. ``by_scaler``: a GradScaler has called it."""

    optimizer: Any
    stepped: set[int]
    has_grads: bool
    by_scaler: bool


@dataclass(eq=False)
class Events:
    """The listeners of each event of one session.

    entered, left: a block whose scale is not 1 begins, and ends before its gradients are unscaled. stepping: a step,
    or each evaluation of its closure, is about to use its gradients. skipped: the host learns that a loss with a moving
    scale overflowed: (scale, min_scale, skipped steps of the optimizer, all its steps). dropped: (optimizer, names of
    parameters that joined it with a gradient of unknown scale, which is gone).
    """

    entered: list[Callable[[BlockFacts], None]] = field(default_factory=list)
    left: list[Callable[[BlockFacts], None]] = field(default_factory=list)
    stepping: list[Callable[[StepFacts], None]] = field(default_factory=list)
    skipped: list[Callable[[float, float, int, int], None]] = field(default_factory=list)
    dropped: list[Callable[[Any, list[str]], None]] = field(default_factory=list)


@outside_of_graphs
def tell(listeners: list[Callable[..., None]], *facts: Any) -> None:
    for listener in tuple(listeners):  # one may take itself off
        listener(*facts)
