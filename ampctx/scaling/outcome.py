"""What became of a step: whether it was taken, by which losses it was not, and whose gradients were inf or nan.

A ``StepOutcome`` is made at every step and costs nothing there: it keeps the flags and scales of that step, which
nobody writes to, and reads them when somebody asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ampctx.kernels import foreach
from ampctx.kernels.each import device_of, dtype_of
from ampctx.kernels.foreach import Factor, FoundInf, PerDevice, move
from ampctx.kernels.sharding import values_of

OVERFLOW = "overflow"
FOUND_INF = "found_inf"
# What a number of a step is, and of which loss.
Number = tuple[Literal["overflowed", "scale", "found_inf", "grad_norm"], int]


class Culprit(NamedTuple):
    """A parameter whose gradient was not finite.

    Attributes:
        name: what the model calls it; ``param_groups[0][3]`` for one that is in no model given to ``amp.initialize``.
        shape: that of the parameter.
        inf: how many elements of the gradient were so. None where the gradient was gone when they were asked for.
        nan: the same.
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
    """Those of ``grads``, (parameter, gradient), that are not finite. ``names`` is called where there are any.

    One read of the gradients and a host sync; where one is not finite, a few more reads of that one, and a second sync.
    """
    pairs = [(p, values_of(grad)) for p, grad in grads]
    _, norms = foreach.unscale_l2norms([values for _, values in pairs], FoundInf(), 1.0)
    suspects = [pair for pair, fine in zip(pairs, norms.isfinite().tolist(), strict=True) if not fine]
    if not suspects:
        return ()
    device = suspects[0][1].device
    counts = [
        move(torch.stack([kind(values).sum() for kind in (torch.isinf, torch.isnan)]), device) for _, values in suspects
    ]
    named = names()
    return tuple(
        Culprit(named.get(id(p), "a parameter of no group"), p.shape, inf, nan)
        for (p, _), (inf, nan) in zip(suspects, torch.stack(counts).tolist(), strict=True)
        if inf or nan  # the norm of large finite numbers may overflow
    )


def listed(culprits: Culprits, most: int = 3) -> str:
    """The first of them in a line."""
    first = ", ".join(map(str, culprits[:most]))
    return first + (f" and {len(culprits) - most} more" if len(culprits) > most else "")


def _tensor_of(scale: Factor | Tensor) -> Tensor:
    value = scale.value if isinstance(scale, PerDevice) else scale
    return value if isinstance(value, Tensor) else torch.tensor(float(value))


class StepOutcome:
    """What became of one ``optimizer.step()``. It stays true when further steps have been taken.

    Where the device decides (the optimizers of ampctx, torch's with ``fused=True``), the first attribute that is read
    is a host sync; elsewhere the host knows already. ``grad_norm`` and the scale of a step may be one of their own.
    For a step in a CUDA graph it tells of the replay after which it is first read.

    A pickle or a copy holds what reading gives.
    """

    def __init__(
        self,
        flags: Mapping[int, Tensor] | Sequence[int] = (),
        *,
        external: Tensor | None = None,
        scales: Mapping[int, Factor | Tensor] | None = None,
        grad_norm: Tensor | None = None,
        culprits: Culprits | Callable[[], Culprits | None] = (),
    ) -> None:
        """``flags``: of each loss, or the ids of those that overflowed, where that is known. ``external``: one that was
        on the optimizer. Nobody may write to any of these tensors."""
        self._flags = dict(flags) if isinstance(flags, Mapping) else None
        self._external = external
        self._overflowed = () if isinstance(flags, Mapping) else tuple(flags)
        self._found_external = False
        self._scales: dict[int, Any] = dict(scales or {})
        self._scales_are_read = False
        self._norm: Tensor | float | None = grad_norm
        self._culprits = culprits

    def _read(self) -> None:
        if self._flags is None and self._external is None:
            return
        flags = {} if self._flags is None else self._flags
        tensors = [*flags.values(), *([] if self._external is None else [self._external])]
        values = _numbers(tensors)
        self._overflowed = (*self._overflowed, *(i for i, value in zip(flags, values, strict=False) if value != 0))
        self._found_external = self._external is not None and values[-1] != 0
        self._flags = self._external = None

    @property
    def skipped(self) -> bool:
        """Whether parameters and optimizer state were left as they are."""
        self._read()
        return bool(self._overflowed) or self._found_external

    @property
    def stepped(self) -> bool:
        """Whether the step was taken."""
        return not self.skipped

    @property
    def reason(self) -> str | None:
        """Why it was skipped, None for a step that was taken.

        "overflow": inf or nan in the gradients; "found_inf": only a flag that somebody else had set on the optimizer
        says so."""
        if not self.skipped:
            return None
        return OVERFLOW if self._overflowed else FOUND_INF

    @property
    def overflowed(self) -> tuple[int, ...]:
        """The ids of the losses whose gradients were not finite; -1 stands for a backward outside of scale_loss."""
        self._read()
        return self._overflowed

    @property
    def scales(self) -> dict[int, float]:
        """The scale that the loss of each id was multiplied by, of those that took part in the step."""
        if not self._scales_are_read:
            values = _numbers([_tensor_of(scale) for scale in self._scales.values()])
            self._scales = dict(zip(self._scales, values, strict=True))
            self._scales_are_read = True
        return dict(self._scales)

    @property
    def scale(self) -> float | None:
        """The one of ``scales``; of several, that of the loss that overflowed, or else of the first. None without."""
        scales = self.scales
        return next((scales[i] for i in (*self.overflowed, *scales) if i in scales), None)

    @property
    def grad_norm(self) -> float | None:
        """The norm of the unscaled gradients before they were clipped.

        It is taken by ``ampctx.clip_grad_norm_`` (of all gradients it was given), or with the finite check of an
        optimizer of ampctx under masters. None where nobody took it."""
        if isinstance(self._norm, Tensor):
            self._norm = self._norm.item()
        return self._norm

    @property
    def culprits(self) -> Culprits | None:
        """The parameters whose gradients were inf or nan; () for a step that was taken.

        Where the host decides they are known at the skip. Where the device decides they are looked for among the
        gradients when first asked for: ask before these are zeroed and before the next block begins, or in an
        ``on_skip`` hook. Later, None: not known any more. Of masters with an optimizer of ampctx, names and shapes stay
        known, counts do not. Of masters with a fused optimizer of torch only an ``on_skip`` hook can tell.
        """
        if callable(self._culprits):
            self._culprits = self._culprits() if self.skipped else ()  # type: ignore[assignment]
        return self._culprits  # type: ignore[return-value]

    def numbers(self) -> dict[Number, Tensor | float]:
        """What tells of the step in numbers, as far as it is there: tensors of one element that nobody writes to, or
        floats once they are read. No host sync."""
        result: dict[Number, Tensor | float] = {("overflowed", i): 1.0 for i in self._overflowed}
        for i, flag in (self._flags or {}).items():
            result["overflowed", i] = flag
        if self._external is not None or self._found_external:
            result["found_inf", 0] = 1.0 if self._external is None else self._external
        for i, scale in self._scales.items():
            result["scale", i] = scale.value if isinstance(scale, PerDevice) else scale
        if self._norm is not None:
            result["grad_norm", 0] = self._norm
        return result

    def name(self, culprits: Culprits) -> None:
        """Says whose gradients were not finite, where that is found out in time."""
        self._culprits = culprits

    def resolve(self) -> StepOutcome:
        """Reads everything but scales and norm, and lets go of what it was read from. A host sync."""
        self._read()
        _ = self.culprits
        return self

    def __getstate__(self) -> dict[str, Any]:
        self.resolve()
        _ = self.scales, self.grad_norm
        return self.__dict__.copy()

    def __repr__(self) -> str:
        if self.stepped:
            return f"StepOutcome(stepped, scales={self.scales}, grad_norm={self.grad_norm})"
        culprits = self.culprits
        return (
            f"StepOutcome(skipped, reason={self.reason!r}, overflowed={self.overflowed}, scales={self.scales}, "
            f"culprits={'not known any more' if culprits is None else listed(culprits)!r})"
        )


@torch.no_grad()
def gathered(numbers: Sequence[Tensor]) -> Tensor:
    """Tensors of one element on any mix of devices as one tensor, ``[len(numbers)]`` in fp32. No host sync."""
    if not numbers:
        return torch.empty(0)
    devices = set(map(device_of, numbers))
    if len(devices) == 1 and set(map(dtype_of, numbers)) == {torch.float32} and not any(map(Tensor.dim, numbers)):
        return torch.stack(list(numbers))
    device = next((d for d in map(device_of, numbers) if d.type != "cpu"), numbers[0].device)
    return torch.stack([move(t.reshape(()).float(), device) for t in numbers])


def _numbers(tensors: Sequence[Tensor]) -> list[float]:
    """Their values, of tensors of one element on any mix of devices, with one host sync."""
    return gathered(tensors).tolist()
