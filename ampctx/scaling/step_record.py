"""The outcome of a step: whether it ran, which losses overflowed, and which gradients were inf or nan. The record of an
optimizer's steps, which decides about skips after an overflow.

Every step makes a ``StepOutcome``, without a host sync. It keeps the flags and scales of the step, which no later step
writes to, and reads them when an attribute is read. A ``StepHistory`` keeps these numbers of the latest steps, and
gathers them into one tensor now and then; only ``lists`` reads them.

amp and ``GradScaler`` have one ``StepRecord`` for each optimizer, and call it in the order of a step:

    overflowed(flags)                                 the host decides, and reads the flags. Or the device decides,
    record.overflowed_at_limit(flags)                     unless one more skip in a row would exceed the limit
    record.counts_for(found_inf, flags)               numbers for an optimizer that counts its skips itself
    record.left_to_device(...), record.conclude(...)  records what the device decided: outcome, counts, history, hooks
    record.decided(...)                               records what the host decided
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ampctx._decorators import arriving, host_may_read
from ampctx._errors import AmpStallError, listed
from ampctx.casts.model_watch import ParameterNames
from ampctx.kernels import foreach, ops
from ampctx.kernels.foreach import Factor, FoundInf, PerDevice, move
from ampctx.kernels.reference import skip_counts
from ampctx.kernels.sharding import values_of
from ampctx.kernels.tensor_loops import device_of, is_fake
from ampctx.scaling.any_optimizer import with_wrapped
from ampctx.scaling.loss_scale import LossScale, check_count

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
    counts = [
        move(torch.stack([kind(values).sum() for kind in (torch.isinf, torch.isnan)]), device) for _, values in suspects
    ]
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


# --- the record -------------------------------------------------------------------------------------------------------

# The loss id of gradients that no block has checked.
OUTSIDE_OF_BLOCKS = -1
# Per loss id, its scale and a 0-d flag.
Flags = dict[int, tuple[LossScale, Tensor]]
Overflowed = list[tuple[int, LossScale]]


def is_to_tell(before: int, skipped: int) -> bool:
    """Whether skips are logged: the first eight, then powers of two, so that a run that overflows forever does not fill
    the log."""
    return skipped <= 8 or skipped.bit_length() != before.bit_length()


def overflowed(flags: Flags) -> Overflowed:
    """The losses whose gradients overflowed. One host sync."""
    each = [flag for _, flag in flags.values()]
    if any(map(is_fake, each)):
        return []
    values = gathered(each).tolist() if len(each) > 1 else [flag.item() for flag in each]
    return [(loss_id, scale) for (loss_id, (scale, _)), value in zip(flags.items(), values, strict=True) if value]


class StepRecord:
    """Decides and records the steps of one optimizer, without a reference to it.

    The device counts the steps that it skips. Asynchronous copies, one at a time, bring the counts to the host.

    Args:
        limit: the number of steps that may be skipped in a row. None: any number.
        history_length, losses: the number of steps that the history keeps, and of loss ids.
        report: see ``SkipLog.report``. None: skips on the device are counted only for a limit.
        hooks: those of steps that ran, and those of skipped ones. Each gets the optimizer and the outcome.

    ``outcome``: of the latest step. ``epoch``: counts calls that may change the gradients in ``.grad`` after a step.
    ``in_a_row``: the skips in a row that the host knows of. ``told``: has warned."""

    def __init__(
        self,
        limit: int | None,
        history_length: int,
        losses: int = 1,
        report: Callable[..., None] | None = None,
        hooks: tuple[Mapping[int, Callable], Mapping[int, Callable]] = ({}, {}),
    ) -> None:
        self.outcome = NO_STEP_YET
        self.history = StepHistory(history_length, losses)
        self.epoch, self.in_a_row, self.told = 0, 0, False
        self.limit, self._report, self._hooks = limit, report, hooks
        self._counts_skips = limit is not None or report is not None
        self._skipped_on_host = 0
        # (Loss id, scale after a skip), as far as the host knows.
        self._scales_after = deque[tuple[int, float]](maxlen=16)
        # Those of ``ops.count_skip``, on the device of the flags. It has all slots from the beginning, so that a
        # replay counts where later steps count. The last slot is that of OUTSIDE_OF_BLOCKS.
        self._counts: Tensor | None = None
        self._slots, self._scales = losses + 1, dict[int, LossScale]()
        # The latest ``counts_for``: the loss id, the numbers, the flag of that step, and the list that it got. A step
        # that raised and is tried again has the same flag.
        self._offered: tuple[int, Sequence[Tensor], Tensor, list[Tensor]] | None = None
        # The counts that were reported: of all skips, and of each loss.
        self._reported, self._reported_of = 0, defaultdict[int, float](float)
        # Counts on their way to the host.
        self._copy: tuple[Tensor, torch.cuda.Event | None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_copy": None, "_offered": None}  # events cannot be copied

    # --- before the step ----------------------------------------------------------------------------------------------

    def overflowed_at_limit(self, flags: Flags) -> Overflowed:
        """The losses that overflowed, if one more skip in a row would exceed the limit. Otherwise [], and the device
        decides. Host sync only at the limit."""
        if self.limit is None:
            return []
        if host_may_read():
            self._poll()
        if self.in_a_row < self.limit:
            return []
        if not (found := overflowed(flags)):
            self._count_in_a_row(False)
        return found

    def counts_for(self, found_inf: Tensor | None, flags: Flags) -> list[Tensor] | None:
        """Counts for an optimizer that counts its steps itself. None unless ``found_inf`` is the flag of one loss, with
        a scale on its device. No host sync."""
        if not self._counts_skips or found_inf is None or len(flags) != 1 or torch.compiler.is_compiling():
            return None
        ((loss_id, (scale, flag)),) = flags.items()
        value, kept = scale.scale, self._offered
        if flag is not found_inf or value is None or value.device != found_inf.device:
            return None
        if kept is not None and kept[0] == loss_id and kept[1][4] is value:
            numbers = kept[1]
        else:
            counts, slot = self._counts_and_slot(loss_id, scale, found_inf.device)
            if value.device != counts.device:
                return None
            numbers, kept = [*skip_counts(counts, slot), value], None
        if kept is None or kept[2] is not found_inf:
            kept = self._offered = loss_id, numbers, found_inf, list(numbers)
        return kept[3]

    # --- after a step that the device decided on ----------------------------------------------------------------------

    def left_to_device(
        self,
        flags: Flags,
        scales: Mapping[int, Factor | Tensor],
        grad_norm: Tensor | None,
        found_inf: Tensor | None,
        culprits: Callable[[], Culprits],
        later: Callable[[bool], Culprits],
        external: bool = False,
        counts: list[Tensor] | None = None,
    ) -> StepOutcome:
        """Makes the outcome of a step, and counts it. The caller gives it to ``conclude``. Host sync only with hooks.

        ``found_inf``: the flag that the step used. ``external``: it includes a flag that no loss has raised.
        ``culprits``, ``later``: give the parameters with non-finite gradients now, or later: then with whether
        ``.grad`` still belongs to this step. ``counts``: the list that the step was given, empty if
        it has counted itself."""
        epoch, record = self.epoch, weakref.ref(self)
        outcome = StepOutcome(
            flags,
            external=found_inf if external else None,
            scales=scales,
            grad_norm=grad_norm,
            culprits=lambda: later((now := record()) is not None and now.epoch == epoch),
        )
        if any(self._hooks) and host_may_read() and outcome.skipped:
            outcome._culprits = culprits()  # found in time
        if flags and found_inf is not None and self._counts_skips and (counts is None or counts):
            for i, (loss_id, (scale, flag)) in enumerate(flags.items()):
                numbers, slot = self._counts_and_slot(loss_id, scale, found_inf.device)
                device = numbers.device
                found, raised, value = (move(t, device) for t in (found_inf, flag, scale.tensors(device)[0]))
                ops.count_skip(numbers, found, raised, value, slot, is_first=i == 0)
        return outcome

    def conclude(self, optimizer: Any, outcome: StepOutcome) -> None:
        self.outcome = outcome
        if not host_may_read():
            return
        self._poll()
        self.history.add(outcome)
        if any(self._hooks):
            for hook in list(self._hooks[outcome.skipped].values()):
                hook(optimizer, outcome)

    # --- after a step that the host decided on ------------------------------------------------------------------------

    def decided(
        self,
        optimizer: Any,
        losses: Sequence[tuple[int, LossScale]],
        scales: Mapping[int, Factor | Tensor],
        grad_norm: Tensor | None,
        culprits: Culprits = (),
    ) -> None:
        """Records a step that ran, or that ``losses`` skip. AmpStallError: one skip too many in a row."""
        if losses:
            self._skipped_on_host += 1
            # torch's LR schedulers warn if they step before the optimizer. A skipped step came in the right order. The
            # attribute is private to torch.optim.lr_scheduler; a test guards it. Schedulers may use the wrapped one.
            for one in with_wrapped(optimizer):
                one._opt_called = True
            values = [(loss_id, scale, scale.value()) for loss_id, scale in losses] if self._counts_skips else []
            self._tell(self._skipped_on_host - 1, self._skipped_on_host, values, culprits)
        raised = {loss_id: (scale, 1.0) for loss_id, scale in losses}
        outcome = StepOutcome(raised, scales=scales, grad_norm=grad_norm, culprits=culprits)
        self._count_in_a_row(bool(losses))
        self.conclude(optimizer, outcome)
        if self.limit is None or self.in_a_row <= self.limit:
            return
        several = len({loss_id for loss_id, _ in self._scales_after}) > 1
        course = ", ".join(f"loss {i}: {value}" if several else str(value) for i, value in self._scales_after)
        raise AmpStallError(
            f"{self.in_a_row} steps of {type(optimizer).__name__} in a row were skipped "
            f"(max_consecutive_skips={self.limit}). "
            f"Weights are unchanged. Non-finite gradients: {listed(culprits, 8) if culprits else 'not known'}. Loss "
            f"scale after skips: {course or 'not known'}. If "
            "the scale is far down, scaling is not the cause: check input, loss and weights for inf and nan "
            "(torch.autograd.set_detect_anomaly names the op), keep these layers in fp32, use bfloat16 (opt_level O4 "
            "or O5), or lower the learning rate. At the start of a run, begin with a smaller scale or allow more "
            "skips. See docs/errors.md#the-loss-scale-goes-to-0-or-the-loss-is-nan.",
            outcome=outcome,
            scale_history=list(self._scales_after),
        )

    # --- counts of skips ----------------------------------------------------------------------------------------------

    def skipped_steps(self) -> int:
        """The number of skipped steps. Host sync if the device decides."""
        if self._counts is not None:
            self._copy = None
            self._read(self._counts.tolist())
        return self._skipped_on_host + self._reported

    def _counts_and_slot(self, loss_id: int, scale: LossScale, device: torch.device) -> tuple[Tensor, int]:
        """The counts, created on ``device`` if there are none, and the place in them of a loss."""
        if self._counts is None:
            self._counts = torch.zeros(2 + 2 * self._slots, dtype=torch.float32, device=device)
            self._counts[1].fill_(self.in_a_row)
        self._scales[loss_id] = scale
        return self._counts, loss_id % self._slots

    def _count_in_a_row(self, skipped: bool) -> None:
        """Counts a decision of the host. No host sync."""
        if self.limit is None:
            return
        self._copy = None  # the one on its way does not include this step
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        if self._counts is not None:
            self._counts[1].fill_(self.in_a_row)

    def _poll(self) -> None:
        """Reads counts that have arrived, and starts the next copy. No host sync."""
        if type(self._counts) is not Tensor:  # None, or of FakeTensorMode, which has no numbers
            return
        if self._counts.is_cpu:
            numbers, event = self._counts, None
        else:
            numbers, event = self._copy = self._copy or arriving(self._counts)
        if event is None or event.query():
            self._copy = None
            if (values := numbers.tolist())[:2] != [self._reported, self.in_a_row]:
                self._read(values)

    def _read(self, counts: list[float]) -> None:
        self.in_a_row, before = int(counts[1]), self._reported
        if counts[0] <= before:
            return
        losses = []
        for loss_id, scale in self._scales.items():
            counted, value = counts[2 + 2 * (loss_id % self._slots) :][:2]
            if counted > self._reported_of[loss_id]:
                losses.append((loss_id, scale, value))
                self._reported_of[loss_id] = counted
        self._reported = int(counts[0])
        self._tell(before, self._reported, losses)

    def _tell(self, before: int, now: int, losses: list[tuple[int, LossScale, float]], culprits: Culprits = ()) -> None:
        self._scales_after.extend((loss_id, value) for loss_id, _, value in losses)
        if self._report is not None:
            self._report(before, now, losses, culprits, self.history.count + 1)
