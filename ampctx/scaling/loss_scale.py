"""The scale of one loss: its tensors on the device, and its update rule.

    found_inf:  scale = max(scale * backoff_factor, min_scale)                         the clean updates count from 0
    otherwise:  scale = min(scale * growth_factor, max_scale)  after growth_interval clean updates in a row

An op computes this on the device: the one that checks the gradients, or ``ops.update_scale``. This module owns the
tensors, and checks their states in checkpoints:

    amp.state_dict()           {"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0}, "loss_scaler1": ...}
    GradScaler.state_dict()    {"scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000,
                                "_growth_tracker": 0}

Both are format 1, which needs no ``format`` number. Numbers may be tensors or arrays of one element.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from ampctx._collectives import ranks_of, reduced_over
from ampctx._errors import AmpError, AmpKeyError, AmpRankError, AmpTypeError, AmpValueError
from ampctx._saved import check_format, check_known, entry, plain, typed
from ampctx.kernels import ops
from ampctx.kernels.foreach import Factor, FoundInf, PerDevice, Unread, move

_FP32 = torch.finfo(torch.float32)
DYNAMIC = "dynamic"
DYNAMIC_INIT_SCALE = 2.0**16
# On an accelerator ranks read whether their scales differ at every so many agreements.
CHECKED_EVERY = 1000
# Bounds of the factors of the update rule, both exclusive, in torch's words.
FACTORS = {
    "growth_factor": (1.0, math.inf, "The growth factor must be > 1.0."),
    "backoff_factor": (0.0, 1.0, "The backoff factor must be < 1.0 and > 0."),
}


def _checked(name: str, value: Any, kind: Any, what: str, hint: str = "") -> Any:
    if isinstance(value, bool) or not isinstance(value, kind):
        raise AmpTypeError(f"{name} must be {what}, got {type(value).__name__}{hint}")
    return value


# These return the value as a plain number. AmpTypeError and AmpValueError name the argument.
def check_number(name: str, value: Any) -> float:
    return float(_checked(name, value, Real, "a number"))


def check_scale(name: str, value: Any) -> float:
    number = check_number(name, value)
    if not _FP32.tiny <= number <= _FP32.max:
        raise AmpValueError(f"{name} is {number}: a loss scale must be > 0, finite and in the range of fp32")
    return number


def check_count(name: str, value: Any, least: int) -> int:
    number = int(_checked(name, value, Integral, "an int"))
    if not least <= number <= torch.iinfo(torch.int32).max:
        raise AmpValueError(f"{name} is {number}, expected an int >= {least} that fits int32")
    return number


def check_loss_id(value: Any) -> int:
    if type(value) is int:
        return value
    hint = f": {value!r}. Pass the number of the loss, from 0 to num_losses - 1."
    return int(_checked("loss_id", value, Integral, "an int", hint))


def check_factor(name: str, value: Any) -> float:
    low, high, rule = FACTORS[name]
    if not low < (number := check_number(name, value)) < high:
        raise AmpValueError(f"{name} is {number}. {rule}")
    return number


def check_bounds(min_scale: Any, max_scale: Any, kind: str = "scale") -> tuple[float, float]:
    """Both bounds as floats. ``kind`` completes the names in errors: min_scale, min_loss_scale."""
    low, high = check_number(f"min_{kind}", min_scale), check_number(f"max_{kind}", max_scale)
    if not 0.0 <= low <= high or low > _FP32.max or high < _FP32.tiny:
        raise AmpValueError(
            f"min_{kind} is {low} and max_{kind} is {high}, expected 0 <= min_{kind} <= max_{kind} with max_{kind} > 0"
        )
    return low, high


class LossScale:
    """One loss scale: 0-d fp32 ``scale``, 0-d int32 ``growth_tracker`` and ``hysteresis_tracker`` on one device.

    The three tensors are None, and their ``init_`` numbers hold, until a call creates them on its device. A static
    scale (``dynamic=False``) never changes in ``update``, which only counts. ``min_scale`` and ``max_scale`` bound
    ``update``, and a dynamic ``init_scale``. The other arguments are those of ``GradScaler``, with its errors.
    """

    scale: Tensor | None = None
    growth_tracker: Tensor | None = None
    hysteresis_tracker: Tensor | None = None
    observer: Any = None  # gets each check of this loss's gradients by ``observer.checked(flag)``
    process_group: Any = None  # the ranks that agree on flags. None: this rank alone
    until_check = 0  # how many agreements are left until ranks read whether their scales differ
    # Static scale with skip_nonfinite: skips like a dynamic scale but never moves.
    is_held = False
    # Copies of the scale and of 1 / scale, until it changes.
    _factors: tuple[PerDevice, PerDevice] | None = None

    def __init__(
        self,
        init_scale: float,
        dynamic: bool,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        min_scale: float = 0.0,
        max_scale: float = math.inf,
        hysteresis: int = 1,
    ) -> None:
        self.dynamic = dynamic
        self.growth_factor = check_factor("growth_factor", growth_factor)
        self.backoff_factor = check_factor("backoff_factor", backoff_factor)
        self.growth_interval = check_count("growth_interval", growth_interval, 1)
        self.min_scale, self.max_scale = check_bounds(min_scale, max_scale)
        self.init_hysteresis_tracker = self.hysteresis = check_count("hysteresis", hysteresis, 1)
        # The value of a static scale is always init_scale.
        self.init_scale, self.init_growth_tracker = check_scale("init_scale", init_scale), 0
        low, high = self.min_scale, self.max_scale
        if dynamic and not low <= self.init_scale <= high:
            names = "min_scale and max_scale (of amp: min_loss_scale and max_loss_scale)"
            raise AmpValueError(f"init_scale is {self.init_scale}, outside of {low} to {high}, the bounds by {names}")

    @classmethod
    def from_option(
        cls, loss_scale: Any, low: Any, high: Any, skip_nonfinite: bool = False, start: Any = None, interval: Any = None
    ) -> LossScale:
        """The scale for ``amp.initialize(loss_scale=..., min_loss_scale=..., max_loss_scale=..., skip_nonfinite=...,
        init_scale=..., growth_interval=...)``.

        A number gives a static scale without bounds; with ``skip_nonfinite`` a dynamic one that both bounds hold at its
        value. "dynamic" starts at 2**16, or at the nearest bound. None: no bound."""
        if loss_scale == DYNAMIC:
            low, high = check_bounds(0.0 if low is None else low, math.inf if high is None else high, "loss_scale")
            start = max(low, min(high, DYNAMIC_INIT_SCALE)) if start is None else start
            interval = 2000 if interval is None else interval
            return cls(start, dynamic=True, growth_interval=interval, min_scale=low, max_scale=high)
        for name, value in (("init_scale", start), ("growth_interval", interval)):
            if value is not None:
                raise AmpValueError(
                    f"{name}={value!r} is for a dynamic loss scale, and loss_scale={loss_scale} is static: it stays at "
                    f"that number. Pass loss_scale='dynamic', or leave {name} out."
                )
        scale = cls(value := check_scale("loss_scale", loss_scale), dynamic=skip_nonfinite)
        if skip_nonfinite:
            scale.is_held, scale.min_scale, scale.max_scale = True, value, value
        return scale

    def __str__(self) -> str:
        """The value, or where it is, if reading it would be a host sync."""
        if self.scale is None or not self.dynamic or (self.scale.is_cpu and type(self.scale) is Tensor):
            return f"{self.value():.9g}"
        return f"on {self.scale.device}"

    @property
    def is_identity(self) -> bool:
        """Whether the scale is static and exactly 1."""
        return not self.dynamic and self.init_scale == 1.0

    @property
    def moves(self) -> bool:
        return self.dynamic and not self.is_held

    # --- on the device: no host sync --------------------------------------------------------------------------------

    def factors(self, device: torch.device, fresh: bool) -> tuple[Factor, Factor, FoundInf]:
        """The factors of a block for its loss and its gradients, which later updates do not change. And the flags of
        its gradients, which nobody reads for a static scale without an observer.

        ``fresh``: make new copies, at the start of an iteration, so that a replay reads the scale."""
        found_inf = FoundInf() if self.dynamic or self.observer is not None else Unread()
        if not self.dynamic and self.init_scale == 1.0:
            return 1.0, 1.0, found_inf
        if fresh or self._factors is None:
            scale = self.scale if self.scale is not None else self.tensors(device)[0]
            copy, inverse, found_inf.clear = ops.block_factors(scale)
            self._factors = PerDevice(copy), PerDevice(inverse)
        return *self._factors, found_inf

    def tell(self, found_inf: Tensor) -> None:
        if self.observer is not None:
            self.observer.checked(found_inf)

    def groups_with(self, of_meshes: Iterable[Any]) -> list[Any]:
        """The process groups whose ranks agree on flags: of the gradients' meshes, and its own. None if static."""
        groups = dict.fromkeys([*of_meshes, self.process_group]) if self.dynamic else ()
        return [group for group in groups if group is not None]

    def agreed(self, found_inf: Tensor, of_meshes: Iterable[Any], call: str) -> Tensor:
        """Whether a one-element flag is set on a rank of ``groups_with(of_meshes)``: 0.0 or 1.0, fp32. Every rank must
        take part. ``call``: for messages.

        1 if scales differ by more than some 1e-6, so that every rank skips the step; then AmpRankError where the host
        reads it: each time on the CPU, where it waits anyway; else the first time, after a load and every 1,000th."""
        if not (groups := self.groups_with(of_meshes)):
            return found_inf
        flag, scale = found_inf.detach().reshape(()), move(self.tensors(found_inf.device)[0], found_inf.device).double()
        # Besides the flag the number of ranks, the scale and its square, whose sums show whether a scale differs.
        joined = torch.stack((flag != 0, torch.ones_like(flag), scale, scale * scale))
        reduced_over(joined, torch.distributed.ReduceOp.SUM, groups, call, "a found_inf flag")
        captures = joined.is_cuda and torch.cuda.is_current_stream_capturing()
        reads = joined.is_cpu or (self.until_check == 0 and not captures)
        _, number, total, squares = joined.tolist() if reads else joined.unbind()
        alike = number * squares <= total * total * (1 + 1e-12)  # their variance is 0, up to rounding
        if reads:
            self.until_check = CHECKED_EVERY
            if not alike:
                here = f"This is {' and '.join(map(ranks_of, groups))}, and has {self.value()}."
                raise AmpRankError(
                    f"{call}: loss scales differ between ranks. {here} Load the same amp.state_dict() on every rank. "
                    "See `ampctx explain differ-between-ranks`."
                )
        self.until_check = max(0, self.until_check - 1)
        flag = joined[0] > 0
        return (flag if reads else flag | ~alike).float()

    def update(self, found_inf: Tensor) -> None:
        """Applies the update rule to a one-element flag, set if != 0. No host sync if flag and scale share a device.
        A static scale only counts updates with a clear flag."""
        scale, growth_tracker, _ = self.tensors(found_inf.device)
        if found_inf.device != scale.device:
            found_inf = move(found_inf, scale.device)
        if self.dynamic:
            ops.update_scale(found_inf=found_inf, **self.update_with_check(scale.device)._asdict())
        else:
            growth_tracker.add_(found_inf.reshape(()) == 0)

    def update_with_check(self, device: torch.device) -> ops.ScaleUpdate:
        """Returns what ``update`` of a dynamic scale does, for the op that checks the gradients."""
        self._factors = None  # first: an exception must not leave outdated copies
        rule: Any = self.growth_factor, self.backoff_factor, self.growth_interval, self.hysteresis
        bounds: Any = self.min_scale, self.max_scale
        return ops.ScaleUpdate(*self.tensors(device), *rule, *bounds)

    def count_clean(self, device: torch.device) -> None:
        """``update`` of a static scale with a clear flag."""
        self.tensors(device)[1].add_(1)

    # --- on the host ------------------------------------------------------------------------------------------------

    def value(self) -> float:
        """The scale. Host sync for a dynamic scale on an accelerator."""
        return self.init_scale if self.scale is None or not self.dynamic else self.scale.item()

    def set(self, value: float | Tensor) -> None:
        """Replaces the scale. The bounds apply only to ``update``. No host sync.

        A dynamic scale also copies a one-element tensor on the device; if its value is not > 0 and finite, the scale
        stays. One that is held takes the bounds along, and reads the tensor: a host sync.
        """
        if isinstance(value, Tensor) and (not self.dynamic or value.numel() != 1):
            raise AmpValueError("only a dynamic loss scale takes a tensor, of one element; pass a float")
        if isinstance(value, Tensor) and not self.is_held:
            scale = self.tensors(value.device)[0]
            # To fp32 first: values out of its range become 0 or inf.
            new = move(value.detach().reshape(()).to(torch.float32), scale.device)
            scale.copy_(torch.where((new >= _FP32.tiny) & (new <= _FP32.max), new, scale))
        else:
            self._put("scale", check_scale("loss_scale", value.item() if isinstance(value, Tensor) else value))
            if self.is_held:
                self.min_scale = self.max_scale = self.init_scale
        self._factors = None

    def unskipped(self) -> int:
        """The clean updates in a row. Host sync for a scale on an accelerator."""
        return self.init_growth_tracker if self.growth_tracker is None else int(self.growth_tracker.item())

    def hysteresis_left(self) -> int:
        """The overflows until the scale falls. Host sync for a scale on an accelerator."""
        return self.init_hysteresis_tracker if self.hysteresis_tracker is None else int(self.hysteresis_tracker.item())

    def set_unskipped(self, n: int) -> None:
        self._put("growth_tracker", check_count("unskipped", n, 0))

    def set_hysteresis_left(self, n: int) -> None:
        self._put("hysteresis_tracker", check_count("hysteresis_tracker", n, 0))

    def _put(self, name: str, number: float) -> None:
        setattr(self, f"init_{name}", number)
        if (tensor := getattr(self, name)) is not None:
            tensor.fill_(number)

    def state_dict(self) -> dict[str, Any]:
        """``{"loss_scale": float, "unskipped": int}`` as in apex, and "hysteresis" if it is above 1. Host sync."""
        more = {"hysteresis": self.hysteresis_left()} if self.hysteresis > 1 else {}
        return {"loss_scale": self.value(), "unskipped": self.unskipped(), **more}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a state of ``state_dict`` or of apex that ``read_amp_entries`` has checked."""
        self.until_check = 0
        self.set(state["loss_scale"])
        self.set_unskipped(state["unskipped"])
        self.set_hysteresis_left(state.get("hysteresis", self.hysteresis))

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Scale, growth tracker and hysteresis tracker, which updates change in place. Creates missing ones: the scale
        on ``device``, the others beside it."""
        if self.scale is None:
            self.scale = torch.full((), self.init_scale, dtype=torch.float32, device=device)
        at = self.scale.device
        for name in ("growth_tracker", "hysteresis_tracker"):
            if getattr(self, name) is None:
                setattr(self, name, torch.full((), getattr(self, f"init_{name}"), dtype=torch.int32, device=at))
        return self.scale, self.growth_tracker, self.hysteresis_tracker  # type: ignore[return-value]

    def __getstate__(self) -> dict[str, Any]:
        """Pickles numbers instead of tensors, so that a pickle loads on any device. Host sync."""
        if self.process_group is not None:
            raise AmpError(
                "a loss scale with a process group cannot be copied or pickled, because the group belongs to this "
                "process. Save its state_dict() and load that into a new one."
            )
        numbers = {"scale": self.value(), "growth_tracker": self.unskipped()}
        numbers["hysteresis_tracker"] = self.hysteresis_left()
        kept = {name: value for name, value in vars(self).items() if name not in (*numbers, "observer", "_factors")}
        return kept | {f"init_{name}": number for name, number in numbers.items()}


# --- states in checkpoints --------------------------------------------------------------------------------------------

KEY = "loss_scaler"
# The entries that amp.state_dict(masters=True) adds to the loss scales.
RUN_KEYS = ("format", "opt_level", "optimizers")
# Those of a GradScaler: torch's, and what ours adds.
_OF_SCALERS = ("scale", *FACTORS, "growth_interval", "_growth_tracker", "min_scale", "max_scale", "hysteresis")
_OF_SCALERS += ("_hysteresis_tracker", "format")


def required(state: Mapping[str, Any], key: str) -> Any:
    return entry(state, key, object, "the loss scale's state")


def is_amp_state(state: Any) -> bool:
    return isinstance(state, Mapping) and any(re.match(KEY + r"\d", str(key)) for key in state)


def is_grad_scaler_state(state: Any) -> bool:
    return isinstance(state, Mapping) and ("scale" in state or "_growth_tracker" in state)


def read_amp_entries(state: Any) -> dict[int, dict[str, Any]]:
    """Checks a state in apex's format, but for its ``RUN_KEYS``. Returns its entries by number: "loss_scale",
    "unskipped", "hysteresis" if given. AmpKeyError, AmpTypeError and AmpValueError name what does not fit."""
    typed(state, Mapping, "state_dict")
    matches = {k: re.fullmatch(KEY + r"(0|[1-9]\d*)", str(k), re.ASCII) for k in state if k not in RUN_KEYS}
    if unexpected := [k for k, match in matches.items() if match is None]:
        keys = ", ".join(f'"{k}"' for k in unexpected)
        raise AmpKeyError(f"Error(s) in loading state_dict. Unexpected key(s) in state_dict: {keys}.")
    entries = {}
    for key, match in matches.items():
        assert match is not None
        try:
            one = state[key]
            typed(one, Mapping, "the loss scale's state")
            check_known(one, "the loss scale's state", ("loss_scale", "unskipped", "hysteresis", "dynamic"))
            counts = ("unskipped", "hysteresis") if "hysteresis" in one else ("unskipped",)
            scale = check_scale("loss_scale", plain(required(one, "loss_scale")))
            numbers = {name: check_count(name, plain(required(one, name)), 0) for name in counts}
            entries[int(match[1])] = {"loss_scale": scale, **numbers}
        except AmpError as error:
            raise type(error)(f'state_dict["{key}"]: {error}') from None
    return entries


def read_grad_scaler_state(state: Any) -> dict[str, Any]:
    """Checks a GradScaler's state. Returns its five entries as plain numbers, under torch's names. AmpError for an
    empty dict; AmpKeyError, AmpTypeError and AmpValueError name what does not fit."""
    typed(state, Mapping, "state_dict")
    if len(state) == 0:
        raise AmpError(
            "The source state dict is empty, possibly because it was saved from a disabled instance of GradScaler. "
            "Load it only `if state:`. See `ampctx explain the-source-state-dict-is-empty`."
        )
    check_format(state, "state_dict", _OF_SCALERS)
    numbers = {name: plain(required(state, name)) for name in ("scale", *FACTORS, "growth_interval", "_growth_tracker")}
    factors = {name: check_factor(name, numbers[name]) for name in FACTORS}
    counts = {name: check_count(name, numbers[name], n) for name, n in (("growth_interval", 1), ("_growth_tracker", 0))}
    return {"scale": check_scale("scale", numbers["scale"]), **factors, **counts}


def only_amp_entry(state: Any, loss_id: int | None = None) -> dict[str, Any]:
    """The only entry of a state in apex's format, or entry ``loss_id``. Errors as ``read_amp_entries``; AmpValueError
    for several entries and no ``loss_id``."""
    entries = read_amp_entries(state)
    names = ", ".join(f"{KEY}{i}" for i in entries) or "none"
    if loss_id is None:
        if len(entries) > 1:
            raise AmpValueError(
                f"the state holds {len(entries)} loss scales ({names}), and a GradScaler has one. Choose one with "
                "ampctx_apex.checkpoints.to_grad_scaler_state(state, loss_id=0)."
            )
        loss_id = next(iter(entries), 0)
    loss_id = check_loss_id(loss_id)
    if loss_id not in entries:
        raise AmpKeyError(f'the state has no "{KEY}{loss_id}", only: {names}')
    return entries[loss_id]
