"""The state of a ``GradScaler`` between iterations: loss scale, outcomes of steps, checkpoints."""

from __future__ import annotations

import math
import warnings
import weakref
from collections import defaultdict
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from ampctx._collectives import check_process_group
from ampctx._errors import AmpAssertionError, AmpError, AmpTypeError
from ampctx.scaling import formats
from ampctx.scaling.formats import plain
from ampctx.scaling.guarded_step import GuardedStep
from ampctx.scaling.history import DEFAULT_LENGTH, History, StepHistory, check_length
from ampctx.scaling.loss_scale import LossScale, check_backoff_factor, check_bounds, check_count, check_growth_factor
from ampctx.scaling.outcome import StepOutcome
from ampctx.scaling.stall import check_limit

# Not pickled: the outcomes of steps.
_NOT_SAVED = ("_steps", "_told_of_no_gradients", "_epoch")


def fresh_optimizer_state() -> dict[str, Any]:
    return {"stage": OptState.READY, "found_inf_per_device": {}}


def _of_loss_scale(name: str) -> Any:
    """A private attribute of torch's GradScaler that frameworks use. ``LossScale`` keeps it under ``name``."""

    def get(self: ScalerState) -> Any:
        if self._loss_scale is None:
            # AttributeError like torch's disabled GradScaler, because hasattr() must work.
            raise AttributeError(f"a disabled GradScaler has no {name}")
        return getattr(self._loss_scale, name)

    def set_(self: ScalerState, value: Any) -> None:
        if self._loss_scale is not None:
            setattr(self._loss_scale, name, value)

    return property(get, set_)


class ScalerState(torch.amp.GradScaler):
    """The base of ``GradScaler``, where the arguments are documented. Derives from torch's only for ``isinstance``."""

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float = 0.0,
        max_scale: float = math.inf,
        hysteresis: int = 1,
        max_consecutive_skips: int | None = None,
        process_group: Any = None,
        history: int = DEFAULT_LENGTH,
    ) -> None:
        if not isinstance(device, (str, torch.device)):
            raise AmpTypeError(f"device must be a device type such as 'cuda', got {type(device).__name__}.")
        self._device = torch.device(device).type
        self._enabled = bool(enabled)
        if self._enabled and self._device == "cuda" and not torch.cuda.is_available():
            warnings.warn(
                "GradScaler is enabled, but CUDA is not available. Disabling. Pass device='cpu' to scale on the CPU. "
                "See docs/errors.md#gradscaler-is-enabled-but-cuda-is-not-available.",
                stacklevel=2,
            )
            self._enabled = False
        self._loss_scale: LossScale | None = None
        self._max_consecutive_skips: int | None = None
        self._history_length = 0
        self._forget_steps()
        if self._enabled:
            self._max_consecutive_skips = check_limit(max_consecutive_skips)
            self._history_length = check_length(history)
            check_process_group(process_group)
            self._loss_scale = LossScale(
                init_scale,
                dynamic=True,
                growth_factor=growth_factor,
                backoff_factor=backoff_factor,
                growth_interval=growth_interval,
                min_scale=min_scale,
                max_scale=max_scale,
                hysteresis=hysteresis,
            )
            self._loss_scale.process_group = process_group
        self._per_optimizer_states: dict[int, dict[str, Any]] = defaultdict(fresh_optimizer_state)

    def _forget_steps(self) -> None:
        self._steps: MutableMapping[Any, GuardedStep] = weakref.WeakKeyDictionary()
        # Optimizers with a logged warning about missing gradients.
        self._told_of_no_gradients: weakref.WeakSet[Any] = weakref.WeakSet()
        # Counts calls that may change the gradients in ``.grad`` after a step.
        self._epoch = 0

    _scale = _of_loss_scale("scale")
    _growth_tracker = _of_loss_scale("growth_tracker")
    _hysteresis_tracker = _of_loss_scale("hysteresis_tracker")
    _init_scale = _of_loss_scale("init_scale")
    _init_growth_tracker = _of_loss_scale("init_growth_tracker")
    _growth_factor = _of_loss_scale("growth_factor")
    _backoff_factor = _of_loss_scale("backoff_factor")
    _growth_interval = _of_loss_scale("growth_interval")

    def is_enabled(self) -> bool:
        """Whether the scaler is enabled."""
        return self._enabled

    def get_scale(self) -> float:
        """Returns the scale; 1.0 if disabled. Host sync for a scale on an accelerator."""
        return self._loss_scale.value() if self._loss_scale is not None else 1.0

    def get_growth_factor(self) -> float:
        """Returns the factor by which the scale grows. No host sync."""
        return self._growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Sets the factor by which the scale grows, > 1. No host sync."""
        self._growth_factor = check_growth_factor(new_factor)

    def get_backoff_factor(self) -> float:
        """Returns the factor by which the scale falls. No host sync."""
        return self._backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Sets the factor by which the scale falls, between 0 and 1. No host sync."""
        self._backoff_factor = check_backoff_factor(new_factor)

    def get_growth_interval(self) -> int:
        """Returns the number of clean updates in a row before the scale grows. No host sync."""
        return self._growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Sets the number of clean updates in a row before the scale grows, an int >= 1. No host sync."""
        self._growth_interval = check_count("growth_interval", new_interval, 1)

    def _get_scale_async(self) -> Tensor | None:
        return self._scale

    def _get_growth_tracker(self) -> int:
        return self._loss_scale.unskipped() if self._loss_scale is not None else 0

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        if self._growth_tracker is not None:
            raise AmpAssertionError("_growth_tracker initialized before _scale")
        assert self._loss_scale is not None
        self._loss_scale.scale_on(dev)

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        scale = self._loss_scale
        if scale is not None and scale.scale is not None and scale.growth_tracker is not None:
            return scale.scale, scale.growth_tracker
        name = "_scale" if self._scale is None else "_growth_tracker"
        raise AmpAssertionError(
            f"Attempted {funcname} but {name} is None. Call scaler.scale(loss).backward() before it. "
            "See docs/errors.md#attempted-step-but-_scale-is-none."
        )

    # --- outcomes of steps ------------------------------------------------------------------------------------------

    def outcome(self, optimizer: torch.optim.Optimizer) -> StepOutcome | None:
        """Returns the outcome of the latest ``scaler.step(optimizer)``, None before the first.

        Names of parameters are their places in the optimizer, or the names passed to it. With a disabled scaler every
        step counts as stepped. No host sync, but reading an attribute may be one, see ``StepOutcome``.
        """
        steps = self._steps.get(optimizer)
        return None if steps is None else steps.outcome

    def history(self, optimizer: torch.optim.Optimizer | None = None, last: int | None = None) -> History:
        """Returns the latest steps as plain lists: scales, skips and gradient norms. All loss ids are 0. One host sync.

        A disabled scaler keeps no steps. A pickle or a copy starts with an empty history.

        Args:
            optimizer: optional if the scaler has stepped only one.
            last: the largest number of steps to return. None: all that ``GradScaler(history=...)`` keeps.

        Returns:
            A ``History``.

        Raises:
            AmpError: several optimizers were stepped and none is given.
            AmpTypeError, AmpValueError: ``last`` is not an int >= 0.
        """
        if optimizer is None:
            if len(self._steps) > 1:
                raise AmpError(
                    f"GradScaler.history: {len(self._steps)} optimizers were stepped. Pass one of them: "
                    "scaler.history(optimizer)."
                )
            optimizer = next(iter(self._steps), None)
        steps = None if optimizer is None else self._steps.get(optimizer)
        return (StepHistory(0) if steps is None else steps.history).lists(last)

    def _steps_of(self, optimizer: Any) -> GuardedStep:
        steps = self._steps.get(optimizer)
        if steps is None:
            steps = self._steps[optimizer] = GuardedStep(self._max_consecutive_skips, self._history_length)
        return steps

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns torch's five entries, and those of bounds and hysteresis; {} if disabled. Host sync."""
        loss_scale = self._loss_scale
        if loss_scale is None:
            return {}
        return {
            "scale": loss_scale.value(),
            "growth_factor": loss_scale.growth_factor,
            "backoff_factor": loss_scale.backoff_factor,
            "growth_interval": loss_scale.growth_interval,
            "_growth_tracker": loss_scale.unskipped(),
            "min_scale": loss_scale.min_scale,
            "max_scale": loss_scale.max_scale,
            "hysteresis": loss_scale.hysteresis,
            "_hysteresis_tracker": loss_scale.hysteresis_left(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a ``state_dict()`` of this class, of torch's GradScaler, or of ``amp`` with one loss scale.

        torch's state has no bounds and hysteresis: these stay as constructed. From ``amp.state_dict()`` of apex or
        ampctx it loads scale and counter only. ``ampctx_apex.checkpoints.to_grad_scaler_state`` picks one of several
        scales. An invalid state changes nothing. A disabled scaler loads nothing.

        Args:
            state_dict: the dict to load.

        Raises:
            AmpError: an empty dict, as a disabled scaler saves.
            AmpKeyError: a missing or unknown key.
            AmpTypeError, AmpValueError: an invalid entry, by name; several loss scales.
        """
        loss_scale = self._loss_scale
        if loss_scale is None:
            return
        if formats.is_amp_state(state_dict):
            entry = formats.only_amp_entry(state_dict)
            loss_scale.load_state_dict({"hysteresis": loss_scale.hysteresis, **entry})
            return
        saved = formats.read_grad_scaler_state(state_dict)
        bounds = check_bounds(
            plain(state_dict.get("min_scale", loss_scale.min_scale)),
            plain(state_dict.get("max_scale", loss_scale.max_scale)),
        )
        hysteresis = check_count("hysteresis", plain(state_dict.get("hysteresis", loss_scale.hysteresis)), 1)
        left = check_count("_hysteresis_tracker", plain(state_dict.get("_hysteresis_tracker", hysteresis)), 0)
        loss_scale.growth_factor, loss_scale.backoff_factor = saved.growth_factor, saved.backoff_factor
        loss_scale.growth_interval, loss_scale.hysteresis = saved.growth_interval, hysteresis
        loss_scale.min_scale, loss_scale.max_scale = bounds
        loss_scale.until_check = 0
        loss_scale.set(saved.scale)
        loss_scale.set_unskipped(saved.growth_tracker)
        loss_scale.set_hysteresis_left(left)

    def __getstate__(self) -> dict[str, Any]:
        if self._enabled and self._per_optimizer_states:
            raise AmpAssertionError(
                "A GradScaler instance may only be pickled at the beginning of an iteration, or at the end after "
                "scaler.update()."
            )
        return {name: value for name, value in self.__dict__.items() if name not in _NOT_SAVED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._forget_steps()
        self._max_consecutive_skips, self._history_length = None, DEFAULT_LENGTH  # older pickles lack them
        self.__dict__.update(state)
