"""The outcome of a step: whether it ran, which losses overflowed, and which gradients were inf or nan.

Every step makes a ``StepOutcome``, without a host sync. It keeps the flags and scales of the step, which no later step
writes to, and reads them when an attribute is read. A ``StepHistory`` keeps these numbers of the latest steps, and
gathers them into one tensor now and then; only ``lists`` reads them.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ampctx._errors import listed
from ampctx.casts.model_watch import ParameterNames
from ampctx.kernels import foreach
from ampctx.kernels.foreach import Factor, FoundInf, PerDevice, move
from ampctx.kernels.sharding import values_of
from ampctx.kernels.tensor_loops import device_of
from ampctx.scaling.loss_scale import check_count

DEFAULT_LENGTH = 10_000  # of a history
# Steps before their tensors are gathered into one.
GATHERED_AT_ONCE = 64
# The kind of a number of a step, and its loss id.
Number = tuple[Literal["overflowed", "found_inf", "scale", "grad_norm"], int]


class Culprit(NamedTuple):
    """A parameter whose gradient was not finite.

    Attributes:
        name: its name in the model; ``param_groups[0][3]`` for a parameter of no model given to ``amp.initialize``.
        shape: the shape of the parameter.
        inf: the number of inf elements in the gradient. None if the gradient was gone before they were counted.
        nan: the number of nan elements, or None likewise.
    """

    name: str
    shape: torch.Size
    inf: int | None
    nan: int | None

    def __str__(self) -> str:
        if self.inf is None or self.nan is None:
            return self.name
        counts = [f"{n} {kind}" for n, kind in ((self.inf, "inf"), (self.nan, "nan")) if n]
        return f"{self.name} ({', '.join(counts)} of {self.shape.numel()})"


Culprits = tuple[Culprit, ...]


@torch.no_grad()
def culprits_among(grads: Iterable[tuple[Tensor, Tensor]], names: Callable[[], Mapping[int, str]]) -> Culprits:
    """The parameters of ``grads``, (parameter, gradient), with non-finite gradients. Calls ``names`` if there are any.

    One read of the gradients and a host sync. For non-finite ones, a few more reads and a second sync.
    """
    pairs = [(p, values_of(grad)) for p, grad in grads]
    _, norms = foreach.unscale_l2norms([values for _, values in pairs], FoundInf(), 1.0)
    suspects = [pair for pair, fine in zip(pairs, norms.isfinite().tolist(), strict=True) if not fine]
    if not suspects:
        return ()
    device = suspects[0][1].device
    kinds = torch.isinf, torch.isnan
    counts = [move(torch.stack([kind(values).sum() for kind in kinds]), device) for _, values in suspects]
    named = names()
    return tuple(
        Culprit(named.get(id(p), "a parameter of no group"), p.shape, inf, nan)
        for (p, _), (inf, nan) in zip(suspects, torch.stack(counts).tolist(), strict=True)
        if inf or nan  # the norm of large finite numbers may overflow
    )


def params_of(optimizer: Any) -> list[Any]:
    """The parameters of all groups. Our optimizers step one once even if a group has it twice."""
    found = list(chain.from_iterable(map(itemgetter("params"), optimizer.param_groups)))
    return list(dict.fromkeys(found)) if getattr(optimizer, "_has_repeats", False) else found


def culprits_of(optimizer: Any) -> Culprits:
    """``culprits_among`` all gradients of an optimizer without amp."""
    grads = ((p, p.grad) for p in params_of(optimizer) if p.grad is not None)
    return culprits_among(grads, lambda: ParameterNames().of(optimizer))


def culprits_later(stepped: weakref.ref, is_current: bool) -> Culprits:
    """``culprits_of``, unless ``.grad`` has changed since the step. ``stepped``: the optimizer."""
    optimizer = stepped() if is_current else None
    return () if optimizer is None else culprits_of(optimizer)


class StepOutcome:
    """The outcome of one ``optimizer.step()``. Later steps do not change it.

    Host sync: reading the first attribute, if the device decides (optimizers of ampctx, torch's with ``fused=True``);
    none if the host has decided. Reading ``grad_norm`` or a scale may be another one. For a step in a CUDA graph it
    describes the replay before the first read. A pickle or a copy holds the values. Before the first step there is one
    that neither ``stepped`` nor ``skipped``.

    Example::

        if amp.outcome(optimizer).stepped:
            scheduler.step()
    """

    _is_of_step = True

    def __init__(
        self,
        flags: Mapping[int, tuple[Any, Tensor | float]] = {},
        *,
        external: Tensor | None = None,
        scales: Mapping[int, Factor | Tensor] | None = None,
        grad_norm: Tensor | None = None,
        culprits: Culprits | Callable[[], Culprits] = (),
    ) -> None:
        """``flags``: by loss id, its scale and flag. ``external``: one that was set on the optimizer. No later code may
        write to these tensors."""
        # One-element tensors, or floats once they were read. Never changed, because the history keeps it.
        self.numbers: dict[Number, Tensor | float] = {}
        for i, (_, flag) in flags.items():
            self.numbers["overflowed", i] = flag
        if external is not None:
            self.numbers["found_inf", 0] = external
        for i, factor in (scales or {}).items():
            self.numbers["scale", i] = factor.value if isinstance(factor, PerDevice) else factor
        if grad_norm is not None:
            self.numbers["grad_norm", 0] = grad_norm
        self._culprits: Culprits | Callable[[], Culprits] | None = culprits

    def _read(self, *kinds: str) -> dict[Number, float]:
        found: dict[Number, Any] = {key: value for key, value in self.numbers.items() if key[0] in kinds}
        if tensors := [value for value in found.values() if isinstance(value, Tensor)]:
            values = iter(gathered(tensors).tolist())
            found = {key: next(values) if isinstance(value, Tensor) else value for key, value in found.items()}
            self.numbers = {**self.numbers, **found}
        return found

    @property
    def skipped(self) -> bool:
        """Whether the step left parameters and optimizer state unchanged because of an overflow."""
        return any(self._read("overflowed", "found_inf").values())

    @property
    def stepped(self) -> bool:
        """Whether the step ran."""
        return self._is_of_step and not self.skipped

    @property
    def reason(self) -> str | None:
        """Why the step was skipped, "overflow" for inf or nan in the gradients, or "found_inf" for only a flag that
        other code had set on the optimizer, or ``skip_norm_above``. None if it was not skipped."""
        return None if not self.skipped else "overflow" if self.overflowed else "found_inf"

    @property
    def overflowed(self) -> tuple[int, ...]:
        """The ids of the losses whose gradients were not finite. -1 means a backward outside of scale_loss."""
        flags = self._read("overflowed", "found_inf")
        return tuple(i for (kind, i), flag in flags.items() if flag and kind == "overflowed")

    @property
    def scales(self) -> dict[int, float]:
        """The scale of each loss that had a part in the step, by loss id."""
        return {i: float(scale) for (_, i), scale in self._read("scale").items()}

    @property
    def scale(self) -> float | None:
        """The only one of ``scales``. Of several, that of a loss that overflowed, else the first. None if empty."""
        scales = self.scales
        return next((scales[i] for i in (*self.overflowed, *scales) if i in scales), None)

    @property
    def grad_norm(self) -> float | None:
        """The norm of the unscaled gradients before clipping. Computed by ``ampctx.clip_grad_norm_`` (over its
        parameters), or with the finite check of an optimizer of ampctx with masters. None if neither computed it."""
        norm = self.numbers.get(("grad_norm", 0))
        if isinstance(norm, Tensor):
            norm = norm.item()
            self.numbers = {**self.numbers, ("grad_norm", 0): norm}
        return norm

    @property
    def culprits(self) -> Culprits:
        """The parameters with non-finite gradients; () if the step ran, or if they are not known, as ``culprits_known``
        tells.

        If the host decides, they are known at the skip. If the device decides, the first read searches the gradients:
        read before ``zero_grad()`` and before the next block, or in an ``on_skip`` hook. Later they are unknown. With
        masters and an optimizer of ampctx, names and shapes stay known, counts do not. With masters and a fused
        optimizer of torch, only an ``on_skip`` hook knows.
        """
        return self._known_culprits() or ()

    @property
    def culprits_known(self) -> bool:
        """False where ``culprits`` are () after an overflow: read too late, or other ranks alone have some."""
        return self._known_culprits() is not None

    def _known_culprits(self) -> Culprits | None:
        if callable(self._culprits):
            self._culprits = (self._culprits() or (None if self.overflowed else ())) if self.skipped else ()
        return self._culprits

    def __getstate__(self) -> dict[str, Any]:
        _ = self.culprits, self.scales, self.grad_norm
        return self.__dict__.copy()

    def __repr__(self) -> str:
        if not self._is_of_step:
            return "StepOutcome(no step yet)"
        if self.stepped:
            return f"StepOutcome(stepped, scales={self.scales}, grad_norm={self.grad_norm})"
        culprits = listed(self.culprits) or ("none" if self.culprits_known else "not known any more")
        return (
            f"StepOutcome(skipped, reason={self.reason!r}, overflowed={self.overflowed}, scales={self.scales}, "
            f"culprits={culprits!r})"
        )


NO_STEP_YET = StepOutcome()
NO_STEP_YET._is_of_step = False


@torch.no_grad()
def gathered(numbers: Sequence[Tensor]) -> Tensor:
    """Tensors of one element on any mix of devices as one tensor, ``[len(numbers)]`` in fp32. No host sync."""
    if not numbers:
        return torch.empty(0, dtype=torch.float32, device="cpu")
    device = next((d for d in map(device_of, numbers) if d.type != "cpu"), numbers[0].device)
    return torch.stack([move(t.reshape(()).float(), device) for t in numbers])


# --- the latest steps -------------------------------------------------------------------------------------------------


class History(NamedTuple):
    """Steps of one optimizer, the oldest first, as lists of Python numbers of equal length.

    Attributes:
        step: the number of the step. The first one after ``initialize`` is 0.
        skipped: whether the step was skipped.
        grad_norm: ``StepOutcome.grad_norm`` in fp32; nan if no call computed it.
        scale: by loss id, the scale of the loss; nan if the loss had no part in the step.
        overflowed: by loss id, whether gradients were inf or nan. -1: gradients from outside of ``scale_loss``.
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
    """The outcomes of the latest ``length`` steps of one optimizer, of ``count`` so far. ``losses``: of loss ids."""

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
