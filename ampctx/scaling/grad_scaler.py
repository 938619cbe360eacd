"""torch.amp's GradScaler over ``LossScale`` and the compiled ops, with bounds and hysteresis for the scale.

An optimizer is READY, UNSCALED after ``unscale_`` and STEPPED after ``step``; ``update`` makes it READY again.
The class derives from torch's for the sake of ``isinstance`` alone: every method is written here.
"""

from __future__ import annotations

import inspect
import logging
import math
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from ampctx._errors import AmpAssertionError, AmpError, AmpTypeError, AmpValueError
from ampctx.casts.model_watch import ParameterNames
from ampctx.distributed import check_process_group
from ampctx.kernels import foreach
from ampctx.kernels.each import all_none, device_of, dtype_of, grad_of, layout_of
from ampctx.kernels.foreach import FoundInf, PerDevice, join_flags, move
from ampctx.kernels.sharding import groups_of, place_grads
from ampctx.masters.clip import norm_before_clipping, strided_grad
from ampctx.masters.lazy_grads import declares
from ampctx.scaling import formats
from ampctx.scaling.device_skips import Flags, skips_by_itself
from ampctx.scaling.formats import plain
from ampctx.scaling.fused_layouts import align_gradients
from ampctx.scaling.guarded_step import GuardedStep, Known, Overflowed, overflowed
from ampctx.scaling.history import DEFAULT_LENGTH, History, StepHistory, check_length
from ampctx.scaling.loss_scale import LossScale, check_backoff_factor, check_bounds, check_count, check_growth_factor
from ampctx.scaling.outcome import Culprits, StepOutcome, culprits_among
from ampctx.scaling.stall import check_limit

logger = logging.getLogger("ampctx")


def _refuse_masters(optimizer: Any) -> None:
    """Raises AmpError for an optimizer that steps masters under amp, which says so in an attribute of its ``step``."""
    refuse = getattr(getattr(optimizer, "step", None), "refuse_grad_scaler", None)
    if refuse is not None:
        refuse()


def _fresh_optimizer_state() -> dict[str, Any]:
    return {"stage": OptState.READY, "found_inf_per_device": {}}


def _would_ignore_the_flag(optimizer: Any) -> bool:
    """True of torch's own ``step`` where the groups are not fused, or for the first time with dampening. What another
    class declares is believed."""
    step = getattr(type(optimizer), "step", None)
    return getattr(step, "__module__", "").startswith("torch.optim.") and not skips_by_itself(optimizer)


def _params(optimizer: Any) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _gradients(optimizer: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """(parameter, gradient) of those that have one."""
    return ((p, grad) for p in _params(optimizer) if (grad := p.grad) is not None)


def _culprits(optimizer: Any) -> Culprits:
    return culprits_among(_gradients(optimizer), lambda: ParameterNames().of(optimizer))


# What a pickle leaves behind: what became of steps.
_NOT_SAVED = ("_steps", "_told_of_no_gradients", "_epoch")


class _Untouched:
    """Whether the gradients of an optimizer are still those of when this was made: none replaced, none written to."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._grads = [(weakref.ref(grad), grad._version) for _, grad in _gradients(optimizer)]

    def __call__(self, optimizer: torch.optim.Optimizer) -> bool:
        grads = [grad for _, grad in _gradients(optimizer)]
        return len(grads) == len(self._grads) and all(
            reference() is grad and version == grad._version
            for grad, (reference, version) in zip(grads, self._grads, strict=True)
        )


def _flags(grads: Iterable[Tensor], found_inf: Tensor) -> FoundInf:
    """A flag for each device with gradients, starting from ``found_inf``."""
    flags = FoundInf()
    for device in dict.fromkeys(map(device_of, grads)):
        flags.per_device[device] = move(found_inf, device).clone()
    return flags


def _of_loss_scale(name: str) -> Any:
    """An attribute that torch's GradScaler has, and frameworks reach for, kept by ``LossScale`` under ``name``."""

    def get(self: GradScaler) -> Any:
        if self._loss_scale is None:
            # AttributeError, as from torch's disabled GradScaler: hasattr() must work.
            raise AttributeError(f"a disabled GradScaler has no {name}")
        return getattr(self._loss_scale, name)

    def set_(self: GradScaler, value: Any) -> None:
        if self._loss_scale is not None:
            setattr(self._loss_scale, name, value)

    return property(get, set_)


class GradScaler(torch.amp.GradScaler):
    """Scales losses, unscales gradients, skips steps on non-finite gradients and adapts the scale.

    Same calls, errors and checkpoints as ``torch.amp.GradScaler``; a state_dict of either loads into the other. What
    differs: the scale has bounds and hysteresis and never reaches 0 or inf; bf16, complex and sparse gradients unscale
    on every device; flags of several devices are joined by their maximum, so an optimizer sees 0.0 or 1.0; a step
    without any gradient changes nothing, where torch raises in ``step`` or ``update``.

    Args:
        device: device type of the model, "cuda" by default. Without CUDA that is a warning and a disabled scaler.
        init_scale: the first scale.
        growth_factor: > 1.
        backoff_factor: between 0 and 1.
        growth_interval: clean updates in a row before the scale grows.
        enabled: False turns every method into a pass-through; the other arguments are not looked at then.
        min_scale, max_scale: bounds of the scale, 0 and inf by default.
        hysteresis: overflows in a row before the scale falls, 1 by default.
        max_consecutive_skips: how many steps of an optimizer may be skipped in a row, at least 1; ``step`` raises
            AmpStallError when one more is, after the skip. Optimizers that skip on the device raise later, by as many
            steps as the host is ahead of the device. None, by default: any number.
        process_group: a ``torch.distributed.ProcessGroup`` whose ranks skip steps and move the scale together, where
            they hold different gradients. The check of each optimizer, in ``unscale_`` or else ``step``, is then an
            all_reduce of one number in which every rank has to take part, with gradients or without. A scaler with a
            group cannot be pickled. The ranks of the mesh of DTensor parameters agree in any case.
        history: how many steps of each optimizer ``history()`` keeps, the latest ones. 0: none.

    Raises:
        AmpTypeError, AmpValueError, AmpError: an argument that cannot be used, by name.
    """

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
            raise AmpTypeError(f"device must be a device type such as 'cuda', got {type(device).__name__}")
        self._device = torch.device(device).type
        self._enabled = bool(enabled)
        if self._enabled and self._device == "cuda" and not torch.cuda.is_available():
            warnings.warn(
                "GradScaler is enabled, but CUDA is not available. Disabling. Pass device='cpu' to scale there.",
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
        self._per_optimizer_states: dict[int, dict[str, Any]] = defaultdict(_fresh_optimizer_state)

    def _forget_steps(self) -> None:
        self._steps: MutableMapping[Any, GuardedStep] = weakref.WeakKeyDictionary()
        # Optimizers that were told that there are no gradients.
        self._told_of_no_gradients: weakref.WeakSet[Any] = weakref.WeakSet()
        # Counts what may change the gradients that a step leaves behind.
        self._epoch = 0

    _scale = _of_loss_scale("scale")
    _growth_tracker = _of_loss_scale("growth_tracker")
    _hysteresis_tracker = _of_loss_scale("hysteresis_tracker")
    _init_scale = _of_loss_scale("init_scale")
    _init_growth_tracker = _of_loss_scale("init_growth_tracker")
    _growth_factor = _of_loss_scale("growth_factor")
    _backoff_factor = _of_loss_scale("backoff_factor")
    _growth_interval = _of_loss_scale("growth_interval")

    # --- scale ------------------------------------------------------------------------------------------------------

    def scale(self, outputs: Any) -> Any:
        """``outputs`` times the scale: a tensor, or lists, tuples and iterables of them, nested. No host sync.

        Lists and tuples keep their type, other iterables become iterators. The scale is created on the device of the
        first tensor. A disabled scaler returns ``outputs`` itself.

        Raises:
            AmpValueError: something that is neither a tensor nor an iterable of tensors.
        """
        if not self._enabled:
            return outputs
        self._epoch += 1
        return self._scaled(outputs, [])

    def _scaled(self, value: Any, found: list[PerDevice]) -> Any:
        """``found`` holds the scale, once a first tensor has told its device."""
        if isinstance(value, Tensor):
            if not found:
                if self._scale is None:
                    self._lazy_init_scale_growth_tracker(value.device)
                found.append(PerDevice(self._scale))
            return value * found[0].on(value.device)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self._scaled(part, found) for part in value))
        if isinstance(value, (list, tuple)):
            return type(value)(self._scaled(part, found) for part in value)
        if isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping)):
            return (self._scaled(part, found) for part in value)
        raise AmpValueError(f"outputs must be a Tensor or an iterable of Tensors, got {type(value).__name__}")

    # --- unscale ----------------------------------------------------------------------------------------------------

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients of ``optimizer`` by the scale, in place, and looks for inf and nan. No host sync.

        Optional: ``step`` does it where it was not done. Call it once per step, after the last backward, to clip or
        read true gradients. A sparse gradient is coalesced, ``.grad`` replaced by the result.

        Raises:
            AmpError: called twice, or after ``step``, in one iteration; an optimizer that is under amp with masters (at
                O2 and O5), where scale_loss scales.
            AmpAssertionError: ``scale`` was never called.
            AmpValueError: an fp16 gradient. Nothing is unscaled then.
        """
        if not self._enabled:
            return
        _refuse_masters(optimizer)
        scale, _ = self._check_scale_growth_tracker("unscale_")
        self._forget_interrupted(optimizer)
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.UNSCALED:
            raise AmpError("unscale_() has already been called on this optimizer since the last update().")
        if state["stage"] is OptState.STEPPED:
            raise AmpError("unscale_() is being called after step().")
        found_inf = torch.zeros((), dtype=torch.float32, device=scale.device)
        flags = self._unscale_grads_(optimizer, scale.reciprocal(), found_inf, False)
        state["found_inf_per_device"] = self._agreed(optimizer, flags)
        state["unscaled"] = set(map(id, _params(optimizer)))
        state["stage"] = OptState.UNSCALED

    @torch.no_grad()
    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """``grad *= inv_scale``; a flag for each device with gradients, starting from ``found_inf``. No host sync.

        Frameworks replace or extend this method, with these four arguments in this order.
        """
        grads = self._grads(optimizer, allow_fp16)
        flags = _flags(grads, found_inf)
        foreach.scale(grads, grads, flags, PerDevice(inv_scale))
        return flags.per_device

    def _grads(self, optimizer: torch.optim.Optimizer, allow_fp16: bool) -> list[Tensor]:
        parameters = _params(optimizer)
        if not all(map(isinstance, parameters, repeat(Tensor))):
            self._refuse(optimizer, allow_fp16)
        place_grads(parameters)
        grads = [grad for grad in map(grad_of, parameters) if grad is not None]
        if not allow_fp16 and torch.float16 in set(map(dtype_of, grads)):
            self._refuse(optimizer, allow_fp16)
        if set(map(layout_of, grads)) <= {torch.strided}:
            return grads
        return [grad for grad in map(strided_grad, parameters) if grad is not None]

    @staticmethod
    def _refuse(optimizer: torch.optim.Optimizer, allow_fp16: bool) -> None:
        """Says by name what is no tensor, or has an fp16 gradient."""
        for g, group in enumerate(optimizer.param_groups):
            for i, p in enumerate(group["params"]):
                where = f"param_groups[{g}]['params'][{i}]"
                if not isinstance(p, Tensor):
                    raise AmpAssertionError(f"{where} must be a tensor, got {type(p).__name__}")
                if p.grad is not None and p.grad.dtype == torch.float16 and not allow_fp16:
                    raise AmpValueError(
                        f"Attempting to unscale FP16 gradients. {where} of shape {tuple(p.shape)} has one: keep the "
                        "parameters in fp32 and run the forward under autocast, or let "
                        "amp.initialize(model, optimizer, opt_level='O2') keep fp32 masters of them."
                    )

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
        """Looks for inf and nan in the gradients, fp16 too, and leaves their values alone. No host sync."""
        scale, _ = self._check_scale_growth_tracker("_check_inf_per_device")
        zero = torch.zeros_like(scale)
        if getattr(self._unscale_grads_, "__func__", None) is GradScaler._unscale_grads_:
            # One read of the gradients; the norm that comes with the check is not needed.
            grads = self._grads(optimizer, True)
            flags = _flags(grads, zero)
            foreach.l2norm(grads, flags)
            found = flags.per_device
        else:
            found = self._unscale_grads_(optimizer, torch.ones_like(scale), zero, True)
        found = self._agreed(optimizer, found)
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = found
        return found

    def _agreed(self, optimizer: Any, flags: dict[torch.device, Tensor]) -> dict[torch.device, Tensor]:
        """The flags of all ranks joined, for this rank's devices with gradients, or else that of the scale."""
        of_meshes = groups_of(_params(optimizer))
        if self._loss_scale is None or not self._loss_scale.groups_with(of_meshes):
            return flags
        at = self._scale.device
        joined = self._loss_scale.agreed(join_flags(flags.values(), at), of_meshes)
        return {device: move(joined, device) for device in flags or [at]}

    def _found_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
        return self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]

    # --- step -------------------------------------------------------------------------------------------------------

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """``optimizer.step(*args, **kwargs)`` on unscaled gradients, or nothing when one of them is inf or nan.

        One host read, whatever the number of devices. None for an optimizer with ``_step_supports_amp_scaling``, as
        torch's have with ``fused=True``: it finds ``grad_scale`` and ``found_inf`` (0.0 or 1.0) among its attributes.
        (Where it could not skip: groups that are not fused, the first step of torch's fused SGD with dampening, one
        host read.) Without any gradient it changes nothing; a warning says so once.

        Returns:
            What ``optimizer.step`` returned; None for a step that was skipped.

        Raises:
            AmpError: called twice in one iteration, or with a closure; an optimizer that is under amp with masters; a
                parameter with a gradient joined the optimizer after ``unscale_``.
            AmpAssertionError: ``scale`` was never called.
            AmpStallError: more than ``max_consecutive_skips`` steps in a row were skipped, this one included.
        """
        if not self._enabled:
            result = optimizer.step(*args, **kwargs)
            self._steps_of(optimizer).outcome = StepOutcome()
            return result
        if "closure" in kwargs or any(callable(arg) for arg in args):
            raise AmpError(
                "Closure use is not currently supported if GradScaler is enabled. Run the forward and backward before "
                "step()."
            )
        _refuse_masters(optimizer)
        self._check_scale_growth_tracker("step")
        self._forget_interrupted(optimizer)
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise AmpError("step() has already been called since the last update().")
        steps = self._steps_of(optimizer)
        if state["stage"] is OptState.UNSCALED:
            self._refuse_joined(optimizer, state)
        self._tell_of_no_gradients(optimizer)
        result = None
        # None: the device decides, or a framework's own _maybe_opt_step.
        losses: Overflowed | None
        try:
            if declares(optimizer, "_step_supports_amp_scaling") and not _would_ignore_the_flag(optimizer):
                losses = steps.overflowed_instead_of_device(lambda: self._found_inf(optimizer, state)) or None
                if losses is None:
                    result = self._step_on_device(optimizer, state, *args, **kwargs)
            else:
                if state["stage"] is OptState.READY:
                    self.unscale_(optimizer)
                result = self._maybe_opt_step(optimizer, state, *args, **kwargs)
                losses = state.pop("overflowed", None)
        except BaseException:
            state["interrupted"] = _Untouched(optimizer)
            raise
        state.pop("interrupted", None)
        state["stage"] = OptState.STEPPED
        self._record(optimizer, state, steps, losses)
        return result

    @staticmethod
    def _refuse_joined(optimizer: Any, state: dict[str, Any]) -> None:
        """Gradients of parameters that ``unscale_`` has not seen are multiplied by the scale, and not judged."""
        if state.get("unscaled", set()).issuperset(map(id, _params(optimizer))):
            return
        for g, group in enumerate(optimizer.param_groups):
            for i, p in enumerate(group["params"]):
                if p.grad is not None and id(p) not in state.get("unscaled", {id(p)}):
                    raise AmpError(
                        f"param_groups[{g}]['params'][{i}] joined the optimizer after unscale_(): its gradient is "
                        "still multiplied by the scale. Add parameters before unscale_() or after update(), or set "
                        "this gradient to None."
                    )

    def _tell_of_no_gradients(self, optimizer: Any) -> None:
        if all_none(map(grad_of, _params(optimizer))) and optimizer not in self._told_of_no_gradients:
            self._told_of_no_gradients.add(optimizer)
            logger.warning("%s.step() changes nothing: none of its parameters has a gradient", type(optimizer).__name__)

    def outcome(self, optimizer: torch.optim.Optimizer) -> StepOutcome | None:
        """What became of the latest ``scaler.step(optimizer)``; None before the first.

        Parameters are called by their place in the optimizer, or as they were given to it with names. A disabled scaler
        skips nothing. No host sync; reading an attribute may be one, see ``StepOutcome``.
        """
        steps = self._steps.get(optimizer)
        return None if steps is None else steps.outcome

    def history(self, optimizer: torch.optim.Optimizer | None = None, last: int | None = None) -> History:
        """The latest steps as plain lists: scales, skips and gradient norms. The loss id is 0 everywhere.

        A disabled scaler keeps no steps, and a pickle or a copy begins anew. A host sync, the only one.

        Args:
            optimizer: may be left out where the scaler has stepped only one.
            last: how many steps at most. None: all that are kept, the argument ``history`` of the scaler.

        Raises:
            AmpError: several optimizers were stepped and none is given.
            AmpTypeError, AmpValueError: ``last`` is no int of at least 0.
        """
        if optimizer is None:
            if len(self._steps) > 1:
                raise AmpError(
                    f"GradScaler.history: {len(self._steps)} optimizers were stepped: give the one that is meant"
                )
            optimizer = next(iter(self._steps), None)
        steps = None if optimizer is None else self._steps.get(optimizer)
        return (StepHistory(0) if steps is None else steps.history).lists(last)

    def _steps_of(self, optimizer: Any) -> GuardedStep:
        steps = self._steps.get(optimizer)
        if steps is None:
            steps = self._steps[optimizer] = GuardedStep(self._max_consecutive_skips, self._history_length)
        return steps

    def _found_inf(self, optimizer: Any, state: dict[str, Any]) -> Flags:
        """The flag of the gradients, which are checked now if they were not."""
        if state["stage"] is OptState.READY:
            self._check_inf_per_device(optimizer)
        return self._flags_in(state)

    def _flags_in(self, state: dict[str, Any]) -> Flags:
        assert self._loss_scale is not None
        flags = list(state["found_inf_per_device"].values())
        return {0: (self._loss_scale, join_flags(flags, flags[0].device))} if flags else {}

    def _record(self, optimizer: Any, state: dict[str, Any], steps: GuardedStep, losses: Overflowed | None) -> None:
        """Tells what became of a step. ``losses``: those that overflowed; None where the device has decided."""
        assert self._loss_scale is not None
        assert self._loss_scale.scale is not None
        device = self._loss_scale.scale.device
        scales = {0: self._loss_scale.scale_on(device)}
        known = Known(scales, norm_before_clipping(grad for _, grad in _gradients(optimizer)))
        if losses is None:
            found_inf = join_flags(state["found_inf_per_device"].values(), device)
            if self._max_consecutive_skips is not None:
                found_inf = found_inf.ne(0).float()  # for counting; a sum over ranks may be more than 1
            flags = {0: (self._loss_scale, found_inf)}
            outcome = steps.left_to_device(optimizer, flags, known, found_inf, tuple, self._later(optimizer))
            steps.conclude(optimizer, outcome)
        elif losses:
            steps.skipped(optimizer, losses, known, _culprits(optimizer))
        else:
            steps.stepped(optimizer, known)

    def _later(self, optimizer: Any) -> Callable[[int], Culprits | None]:
        """Looks through the gradients as long as they can be those of this step."""
        scaler, stepped, epoch = weakref.ref(self), weakref.ref(optimizer), self._epoch

        def later(_: int) -> Culprits | None:
            if (alive := scaler()) is None or alive._epoch != epoch or (optimizer := stepped()) is None:
                return None
            return _culprits(optimizer) or None

        return later

    def _forget_interrupted(self, optimizer: torch.optim.Optimizer) -> None:
        """After a step that raised, with other gradients in place: they are scaled, and not judged.

        With the same gradients it is tried again.
        """
        untouched = self._per_optimizer_states[id(optimizer)].get("interrupted")
        if untouched is not None and not untouched(optimizer):
            self._per_optimizer_states[id(optimizer)] = _fresh_optimizer_state()

    def _maybe_opt_step(
        self, optimizer: torch.optim.Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        optimizer_state["overflowed"] = overflowed(self._flags_in(optimizer_state))
        return None if optimizer_state["overflowed"] else optimizer.step(*args, **kwargs)

    def _step_on_device(self, optimizer: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """The step of an optimizer that unscales and skips by itself."""
        if "grad_scaler" in inspect.signature(optimizer.step).parameters:
            warnings.warn(
                "GradScaler is going to stop passing itself as a keyword argument: torch deprecated the parameter "
                f"grad_scaler of {type(optimizer).__name__}.step. Read self.grad_scale and self.found_inf instead.",
                FutureWarning,
                stacklevel=3,
            )
            return optimizer.step(*args, **{**kwargs, "grad_scaler": self})
        if state["stage"] is OptState.READY:
            self._check_inf_per_device(optimizer)
        align_gradients(optimizer)
        scale, _ = self._check_scale_growth_tracker("step")
        given = getattr(optimizer, "grad_scale", None)
        if state["stage"] is OptState.READY:
            optimizer.grad_scale = scale.clone() if given is None else scale * given
        else:
            optimizer.grad_scale = given
        # torch's fused CPU kernels compare with 1: a flag that was summed over ranks must not pass.
        optimizer.found_inf = join_flags(state["found_inf_per_device"].values(), scale.device).ne(0).float()
        try:
            return optimizer.step(*args, **kwargs)
        finally:
            del optimizer.grad_scale
            del optimizer.found_inf

    # --- update -----------------------------------------------------------------------------------------------------

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Moves the scale by what the optimizers of this iteration found: after the last ``step``. No host sync.

        Where none of them had a gradient, the scale and its count of clean updates stay.

        Args:
            new_scale: the scale to go on with instead, whatever the bounds: a number, or a one-element tensor without
                requires_grad on a device of the scaler's type, which is copied.

        Raises:
            AmpAssertionError: no optimizer was unscaled with gradients, or stepped; a tensor that does not fit.
            AmpTypeError, AmpValueError: a number that is not > 0 and finite.
        """
        if not self._enabled:
            return
        scale, _ = self._check_scale_growth_tracker("update")
        assert self._loss_scale is not None
        if new_scale is None:
            states = self._per_optimizer_states.values()
            flags = [flag for state in states for flag in state["found_inf_per_device"].values()]
            if flags:
                self._loss_scale.update(join_flags(flags, scale.device))
            elif not any(state["stage"] is OptState.STEPPED for state in states):
                raise AmpAssertionError("No inf checks were recorded prior to update. Call step(optimizer) first.")
        else:
            if isinstance(new_scale, Tensor) and (
                new_scale.device.type != self._device or new_scale.numel() != 1 or new_scale.requires_grad
            ):
                raise AmpAssertionError(
                    f"new_scale should be a float or a 1-element tensor on {self._device} with requires_grad=False, "
                    f"got {new_scale.numel()} on {new_scale.device} with requires_grad={new_scale.requires_grad}"
                )
            self._loss_scale.set(new_scale)
        self._per_optimizer_states = defaultdict(_fresh_optimizer_state)

    # --- what the scaler holds --------------------------------------------------------------------------------------

    def is_enabled(self) -> bool:
        """Whether the scaler does anything."""
        return self._enabled

    def get_scale(self) -> float:
        """The scale; 1.0 when disabled. A host sync when it lives on an accelerator."""
        return self._loss_scale.value() if self._loss_scale is not None else 1.0

    def get_growth_factor(self) -> float:
        return self._growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """``new_factor`` > 1."""
        self._growth_factor = check_growth_factor(new_factor)

    def get_backoff_factor(self) -> float:
        return self._backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """``new_factor`` between 0 and 1."""
        self._backoff_factor = check_backoff_factor(new_factor)

    def get_growth_interval(self) -> int:
        return self._growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """``new_interval`` >= 1."""
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
        for name, tensor in (("_scale", self._scale), ("_growth_tracker", self._growth_tracker)):
            if tensor is None:
                raise AmpAssertionError(
                    f"Attempted {funcname} but {name} is None. Call scaler.scale(loss or outputs) before it."
                )
        return self._scale, self._growth_tracker

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """torch's five entries, and those of bounds and hysteresis; {} when disabled. A host sync."""
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
        """Takes the state of this class or of torch's, which lacks bounds and hysteresis: those stay as constructed.

        An ``amp.state_dict()`` with one loss scale, apex's or ours, is taken as well: scale and counter. All settings
        stay as constructed. ``ampctx.compat.checkpoints.to_grad_scaler_state`` picks one of several.

        Nothing changes when an entry is missing or unusable; nothing at all when disabled.

        Raises:
            AmpError: an empty dict, as a disabled scaler saves.
            AmpKeyError: a missing key, or one with no place here.
            AmpTypeError, AmpValueError: an entry that cannot be used, by name; several loss scales.
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
        self._max_consecutive_skips, self._history_length = None, DEFAULT_LENGTH  # of a pickle of before
        self.__dict__.update(state)
