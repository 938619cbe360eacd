"""torch.amp's GradScaler over ``LossScale`` and the compiled ops, with bounds and hysteresis for the scale.

An optimizer is READY, UNSCALED after ``unscale_`` and STEPPED after ``step``; ``update`` makes it READY again.
Every method is written here, or in ``scaler_state`` those about what the scaler holds between iterations.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from ampctx._errors import AmpAssertionError, AmpError, AmpValueError
from ampctx.casts.model_watch import ParameterNames
from ampctx.kernels import foreach
from ampctx.kernels.each import device_of, dtype_of, grad_of, layout_of
from ampctx.kernels.foreach import FoundInf, PerDevice, join_flags, move
from ampctx.kernels.sharding import any_sharded, groups_of, place_grads
from ampctx.masters.clip import norm_before_clipping, strided_grad
from ampctx.masters.lazy_grads import declares
from ampctx.scaling.device_skips import Flags, asks_for_grad_scaler, skips_by_itself
from ampctx.scaling.fused_layouts import align_gradients
from ampctx.scaling.guarded_step import GuardedStep, Known, Overflowed, overflowed
from ampctx.scaling.outcome import Culprits, StepOutcome, culprits_among
from ampctx.scaling.scaler_state import ScalerState, fresh_optimizer_state

logger = logging.getLogger("ampctx")


def _params(optimizer: Any) -> list[Any]:
    found = [p for group in optimizer.param_groups for p in group["params"]]
    # Ours step a parameter once that is in a group twice, and its gradient is to be unscaled once.
    return list(dict.fromkeys(found)) if getattr(optimizer, "_has_repeats", False) else found


def _gradients(optimizer: Any) -> list[tuple[Tensor, Tensor]]:
    """(parameter, gradient) of those that have one."""
    return [(p, grad) for p in _params(optimizer) if (grad := p.grad) is not None]


def _culprits(optimizer: Any) -> Culprits:
    return culprits_among(_gradients(optimizer), lambda: ParameterNames().of(optimizer))


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


class GradScaler(ScalerState):
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
        scale, state = self._begun("unscale_", optimizer)
        if state["stage"] is OptState.UNSCALED:
            raise AmpError("unscale_() has already been called on this optimizer since the last update().")
        if state["stage"] is OptState.STEPPED:
            raise AmpError("unscale_() is being called after step().")
        found_inf = torch.zeros((), dtype=torch.float32, device=scale.device)
        flags = self._unscale_grads_(optimizer, scale.reciprocal(), found_inf, False)
        parameters = _params(optimizer)
        state["found_inf_per_device"] = self._agreed(parameters, flags)
        state["unscaled"] = set(map(id, parameters))
        state["stage"] = OptState.UNSCALED

    def _begun(self, funcname: str, optimizer: Any) -> tuple[Tensor, dict[str, Any]]:
        """The scale, and the state of an optimizer that may be unscaled and stepped."""
        # One that steps masters under amp says so in an attribute of its step.
        if (refuse := getattr(getattr(optimizer, "step", None), "refuse_grad_scaler", None)) is not None:
            refuse()
        scale, _ = self._check_scale_growth_tracker(funcname)
        state = self._per_optimizer_states[id(optimizer)]
        # A step raised. With the same gradients it is tried again; others are scaled, and not checked.
        if (untouched := state.get("interrupted")) is not None and not untouched(optimizer):
            state = self._per_optimizer_states[id(optimizer)] = fresh_optimizer_state()
        return scale, state

    @torch.no_grad()
    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """``grad *= inv_scale``; a flag for each device with gradients, starting from ``found_inf``. No host sync.

        Frameworks replace or extend this method, with these four arguments in this order.
        """
        parameters = _params(optimizer)
        grads, flags = self._grads(optimizer, parameters, any_sharded(parameters), allow_fp16), FoundInf()
        flags.per_device = {device: move(found_inf, device).clone() for device in set(map(device_of, grads))}
        foreach.scale(grads, grads, flags, PerDevice(inv_scale))
        return flags.per_device

    def _grads(self, optimizer: Any, parameters: list[Any], sharded: bool, allow_fp16: bool) -> list[Tensor]:
        if not all(map(isinstance, parameters, repeat(Tensor))):
            self._refuse(optimizer, allow_fp16)
        if sharded:
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
        assert self._loss_scale is not None
        parameters = _params(optimizer)
        sharded = any_sharded(parameters)
        if getattr(self._unscale_grads_, "__func__", None) is GradScaler._unscale_grads_:
            # One read of the gradients; the norm that comes with the check is not needed.
            grads, flags = self._grads(optimizer, parameters, sharded, True), FoundInf()
            flags.per_device = {d: torch.zeros((), dtype=torch.float32, device=d) for d in set(map(device_of, grads))}
            foreach.l2norm(grads, flags)
            found = flags.per_device
        else:
            found = self._unscale_grads_(optimizer, torch.ones_like(scale), torch.zeros_like(scale), True)
        if sharded or self._loss_scale.process_group is not None:
            found = self._agreed(parameters, found)
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = found
        return found

    def _agreed(self, parameters: list[Any], flags: dict[torch.device, Tensor]) -> dict[torch.device, Tensor]:
        """The flags of all ranks joined, for this rank's devices with gradients, or else that of the scale."""
        assert self._loss_scale is not None
        of_meshes = groups_of(parameters)
        if not self._loss_scale.groups_with(of_meshes):
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
        host read.) Without any gradient it changes nothing; a warning says so once. Gradients in ``.grad`` are unscaled
        after it, by such an optimizer's kernel; but where that one has skipped they are as they were.

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
        scale, state = self._begun("step", optimizer)
        if state["stage"] is OptState.STEPPED:
            raise AmpError("step() has already been called since the last update().")
        steps, parameters = self._steps_of(optimizer), _params(optimizer)
        if state["stage"] is OptState.UNSCALED:
            self._refuse_joined(optimizer, state)
        if all(p.grad is None for p in parameters) and optimizer not in self._told_of_no_gradients:
            self._told_of_no_gradients.add(optimizer)
            logger.warning("%s.step() changes nothing: none of its parameters has a gradient", type(optimizer).__name__)
        result = None
        # None: the device decides, or a framework's own _maybe_opt_step.
        losses: Overflowed | None
        try:
            if declares(optimizer, "_step_supports_amp_scaling") and (
                # What another class declares is believed; torch's own may have groups that are not fused.
                not getattr(getattr(type(optimizer), "step", None), "__module__", "").startswith("torch.optim.")
                or skips_by_itself(optimizer)
            ):
                losses = steps.overflowed_instead_of_device(lambda: self._found_inf(optimizer, state)) or None
                if losses is None:
                    result = self._step_on_device(optimizer, state, scale, *args, **kwargs)
            else:
                if state["stage"] is OptState.READY:
                    self.unscale_(optimizer)
                result = self._maybe_opt_step(optimizer, state, *args, **kwargs)
                losses = state.pop("overflowed", None)
            state.pop("interrupted", None)
            state["stage"] = OptState.STEPPED
            self._record(optimizer, state, steps, losses, parameters)
        except BaseException:
            state["interrupted"] = _Untouched(optimizer)
            raise
        return result

    @staticmethod
    def _refuse_joined(optimizer: Any, state: dict[str, Any]) -> None:
        """Gradients of parameters that ``unscale_`` has not seen are multiplied by the scale, and not checked."""
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

    def _found_inf(self, optimizer: Any, state: dict[str, Any]) -> Flags:
        """The flag of the gradients, which are checked now if they were not."""
        if state["stage"] is OptState.READY:
            self._check_inf_per_device(optimizer)
        return self._flags_in(state)

    def _flags_in(self, state: dict[str, Any]) -> Flags:
        assert self._loss_scale is not None
        flags = list(state["found_inf_per_device"].values())
        return {0: (self._loss_scale, join_flags(flags, flags[0].device))} if flags else {}

    def _record(
        self,
        optimizer: Any,
        state: dict[str, Any],
        steps: GuardedStep,
        losses: Overflowed | None,
        parameters: list[Any],
    ) -> None:
        """Tells what became of a step. ``losses``: those that overflowed; None where the device has decided."""
        assert self._loss_scale is not None
        assert self._loss_scale.scale is not None
        scale = self._loss_scale.scale_on(self._loss_scale.scale.device)
        known = Known({0: scale}, norm_before_clipping(grad for p in parameters if (grad := p.grad) is not None))
        if losses is None:
            found_inf = join_flags(state["found_inf_per_device"].values(), scale.device)
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

    def _maybe_opt_step(
        self, optimizer: torch.optim.Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        optimizer_state["overflowed"] = overflowed(self._flags_in(optimizer_state))
        return None if optimizer_state["overflowed"] else optimizer.step(*args, **kwargs)

    def _step_on_device(self, optimizer: Any, state: dict[str, Any], scale: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The step of an optimizer that unscales and skips by itself."""
        own = "step" in vars(optimizer) or not hasattr(type(optimizer), "step")
        if asks_for_grad_scaler.__wrapped__(optimizer.step) if own else asks_for_grad_scaler(type(optimizer).step):
            warnings.warn(
                "GradScaler is going to stop passing itself as a keyword argument: torch deprecated the parameter "
                f"grad_scaler of {type(optimizer).__name__}.step. Read self.grad_scale and self.found_inf instead.",
                FutureWarning,
                stacklevel=3,
            )
            return optimizer.step(*args, **{**kwargs, "grad_scaler": self})
        given = getattr(optimizer, "grad_scale", None)
        if state["stage"] is OptState.READY:
            self._check_inf_per_device(optimizer)
            given = scale.clone() if given is None else scale * given
        if any(group.get("fused") for group in optimizer.param_groups):
            align_gradients(optimizer)
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
                found_inf = join_flags(flags, scale.device)
                # First: an exception must not leave flags that move the scale a second time.
                self._per_optimizer_states = defaultdict(fresh_optimizer_state)
                self._loss_scale.update(found_inf)
                return
            if not any(state["stage"] is OptState.STEPPED for state in states):
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
        self._per_optimizer_states = defaultdict(fresh_optimizer_state)
