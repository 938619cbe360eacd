"""torch.amp's GradScaler over ``LossScale`` and the compiled ops, with bounds and hysteresis for the scale.

An optimizer is READY, UNSCALED after ``unscale_`` and STEPPED after ``step``; ``update`` makes it READY again. Getters,
setters and checkpoints are in ``scaler_state``.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from ampctx._errors import AmpAssertionError, AmpError, AmpValueError
from ampctx.casts.model_watch import ParameterNames
from ampctx.kernels import foreach
from ampctx.kernels.foreach import FoundInf, PerDevice, join_flags, move
from ampctx.kernels.handles import ReadTensors, read_grads
from ampctx.kernels.sharding import any_sharded, groups_of, place_grads
from ampctx.kernels.tensor_loops import device_of, dtype_of, layout_of
from ampctx.scaling.device_skips import Flags, asks_for_grad_scaler, skips_by_itself
from ampctx.scaling.fused_layouts import align_gradients
from ampctx.scaling.guarded_step import GuardedStep, Known, Overflowed, overflowed
from ampctx.scaling.outcome import Culprits, StepOutcome, culprits_among
from ampctx.scaling.scaler_state import ScalerState, fresh_optimizer_state
from ampctx.weights.clip import norm_before_clipping, strided_grad
from ampctx.weights.step import declares

logger = logging.getLogger("ampctx")


def _params(optimizer: Any) -> list[Any]:
    found = [p for group in optimizer.param_groups for p in group["params"]]
    # Our optimizers step a parameter once even if a group has it twice. Its gradient must be unscaled once.
    return list(dict.fromkeys(found)) if getattr(optimizer, "_has_repeats", False) else found


def _gradients(optimizer: Any) -> list[tuple[Tensor, Tensor]]:
    """(parameter, gradient) of the parameters with a gradient."""
    return [(p, grad) for p in _params(optimizer) if (grad := p.grad) is not None]


def _culprits(optimizer: Any) -> Culprits:
    return culprits_among(_gradients(optimizer), lambda: ParameterNames().of(optimizer))


class _Untouched:
    """Tells whether the gradients of an optimizer were replaced or written to since this was made."""

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

    Same calls, errors and checkpoints as ``torch.amp.GradScaler``; each loads the other's state_dict. Differences: the
    scale has bounds and hysteresis, and never reaches 0 or inf. bf16, complex and sparse gradients unscale on every
    device. ``found_inf`` is 0.0 or 1.0 with several devices, too. A step without any gradient changes nothing; torch
    raises in ``step`` or ``update``.

    Example::

        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    Args:
        device: device type of the model, "cuda" by default. Without CUDA a warning, and the scaler is disabled.
        init_scale: the first scale, 2**16 by default.
        growth_factor: > 1, 2 by default.
        backoff_factor: between 0 and 1, 0.5 by default.
        growth_interval: clean updates in a row before the scale grows, 2000 by default.
        enabled: False turns every method into a pass-through, and ignores the other arguments.
        min_scale, max_scale: bounds of the scale, 0 and inf by default.
        hysteresis: overflows in a row before the scale falls, 1 by default.
        max_consecutive_skips: the number of steps of an optimizer that may be skipped in a row, at least 1. After one
            more skip ``step`` raises AmpStallError. An optimizer that skips on the device raises a few steps later,
            because the host does not wait for the device. None, the default: any number.
        process_group: a ``torch.distributed.ProcessGroup`` whose ranks skip steps and change the scale together. Needed
            if ranks hold different gradients. The check of each optimizer, in ``unscale_`` or ``step``, is then an
            all_reduce of three numbers, and every rank must take part, with or without gradients: else AmpRankError,
            also if the scales differ. Over NCCL the first and every 1,000th of them is a host sync, to compare the
            scales. A scaler with a group cannot be pickled. Ranks of a DTensor mesh always agree.
        history: the number of latest steps that ``history()`` keeps for each optimizer. 0: none.

    Raises:
        AmpTypeError, AmpValueError, AmpError: an invalid argument, by name.
    """

    # --- scale ------------------------------------------------------------------------------------------------------

    def scale(self, outputs: Any) -> Any:
        """Multiplies ``outputs`` by the scale. No host sync.

        Args:
            outputs: a tensor of any shape, or lists, tuples and iterables of tensors, nested.

        Returns:
            The products. Lists and tuples keep their type, other iterables become iterators. A disabled scaler returns
            ``outputs`` itself.

        Raises:
            AmpValueError: ``outputs`` has an element that is neither a tensor nor an iterable of tensors.
        """
        if not self._enabled:
            return outputs
        self._epoch += 1
        return self._scaled(outputs, [])

    def _scaled(self, value: Any, found: list[PerDevice]) -> Any:
        """``found`` holds the scale after the first tensor: the scale is created on its device."""
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
        """Divides the gradients of ``optimizer`` by the scale in place, and checks for inf and nan. No host sync.

        Optional: ``step`` unscales otherwise. Call it once per step, after the last backward, to clip or read unscaled
        gradients. Coalesces sparse gradients, and stores the result in ``.grad``.

        Args:
            optimizer: any torch optimizer with fp32, bf16, fp64 or complex gradients.

        Raises:
            AmpError: called twice, or after ``step``, in one iteration; an optimizer under amp with masters (O2, O5),
                where scale_loss scales.
            AmpAssertionError: ``scale`` was never called.
            AmpValueError: an fp16 gradient. Nothing has changed then.
        """
        if not self._enabled:
            return
        scale, state = self._begun("unscale_", optimizer)
        if state["stage"] is OptState.UNSCALED:
            raise AmpError(
                "unscale_() has already been called on this optimizer since the last update(). Call unscale_, step "
                "and update once per step, after the last backward. See docs/errors.md"
                "#unscale_-has-already-been-called-on-this-optimizer-since-the-last-update."
            )
        if state["stage"] is OptState.STEPPED:
            raise AmpError("unscale_() is being called after step(). Call it before step(), after the last backward.")
        parameters = _params(optimizer)
        # After an agreement that failed, a second try finds the gradients unscaled.
        if (flags := state.get("not_agreed")) is None:
            found_inf = torch.zeros((), dtype=torch.float32, device=scale.device)
            flags = self._unscale_grads_(optimizer, scale.reciprocal(), found_inf, False)
        try:
            state["found_inf_per_device"] = self._agreed(parameters, flags)
        except BaseException:
            state["not_agreed"], state["interrupted"] = flags, _Untouched(optimizer)
            raise
        state.pop("not_agreed", None)
        state.pop("interrupted", None)
        state["unscaled"] = set(map(id, parameters))
        state["stage"] = OptState.UNSCALED

    def _begun(self, funcname: str, optimizer: Any) -> tuple[Tensor, dict[str, Any]]:
        """Checks that the optimizer may be unscaled or stepped. Returns the scale and the optimizer's state."""
        # amp marks the step of an optimizer with masters.
        if (refuse := getattr(getattr(optimizer, "step", None), "refuse_grad_scaler", None)) is not None:
            refuse()
        scale, _ = self._check_scale_growth_tracker(funcname)
        state = self._per_optimizer_states[id(optimizer)]
        # A step raised. The same gradients are for a second try; new ones are scaled and not checked.
        if (untouched := state.get("interrupted")) is not None and not untouched(optimizer):
            state = self._per_optimizer_states[id(optimizer)] = fresh_optimizer_state()
        return scale, state

    @torch.no_grad()
    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """``grad *= inv_scale``. Returns a flag for each device with gradients, starting from ``found_inf``. No host
        sync.

        Frameworks override this method, so its four arguments and their order must stay.
        """
        parameters = _params(optimizer)
        grads, flags = self._grads(optimizer, parameters, any_sharded(parameters), allow_fp16), FoundInf()
        devices = {grads.device} if isinstance(grads, ReadTensors) else set(map(device_of, grads))
        flags.per_device = {device: move(found_inf, device).clone() for device in devices}
        foreach.scale(grads, grads, flags, PerDevice(inv_scale))
        return flags.per_device

    def _grads(self, optimizer: Any, parameters: list[Any], sharded: bool, allow_fp16: bool) -> Sequence[Tensor]:
        """The dense gradients, or the values of sparse ones; a handle if one op call can take them."""
        if not all(map(isinstance, parameters, repeat(Tensor))):
            self._refuse(optimizer, allow_fp16)
        if sharded:
            place_grads(parameters)
        found, known = read_grads(parameters)
        if known is not None and (allow_fp16 or known.dtype != torch.float16):
            return known
        grads = [grad for grad in found if grad is not None]
        if not allow_fp16 and torch.float16 in set(map(dtype_of, grads)):
            self._refuse(optimizer, allow_fp16)
        if set(map(layout_of, grads)) <= {torch.strided}:
            return grads
        return [grad for grad in map(strided_grad, parameters) if grad is not None]

    @staticmethod
    def _refuse(optimizer: torch.optim.Optimizer, allow_fp16: bool) -> None:
        """Raises for the first parameter that is no tensor or has an fp16 gradient."""
        for g, group in enumerate(optimizer.param_groups):
            for i, p in enumerate(group["params"]):
                where = f"param_groups[{g}]['params'][{i}]"
                if not isinstance(p, Tensor):
                    raise AmpAssertionError(f"{where} must be a tensor, got {type(p).__name__}")
                if p.grad is not None and p.grad.dtype == torch.float16 and not allow_fp16:
                    raise AmpValueError(
                        f"Attempting to unscale FP16 gradients. {where} of shape {tuple(p.shape)} has one. Keep the "
                        "parameters in fp32 and run the forward under autocast, or let "
                        "amp.initialize(model, optimizer, opt_level='O2') keep fp32 masters of them. "
                        "See docs/errors.md#attempting-to-unscale-fp16-gradients."
                    )

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
        """Checks the gradients, fp16 included, for inf and nan without changing them. No host sync."""
        scale, _ = self._check_scale_growth_tracker("_check_inf_per_device")
        assert self._loss_scale is not None
        parameters = _params(optimizer)
        sharded = any_sharded(parameters)
        if getattr(self._unscale_grads_, "__func__", None) is GradScaler._unscale_grads_:
            # Reads the gradients once. The norm is not needed.
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
        """The flags joined over all ranks, for this rank's devices with gradients, or else for the scale's device."""
        assert self._loss_scale is not None
        of_meshes = groups_of(parameters)
        if not self._loss_scale.groups_with(of_meshes):
            return flags
        at = self._scale.device
        joined = self._loss_scale.agreed(join_flags(flags.values(), at), of_meshes, "GradScaler")
        return {device: move(joined, device) for device in flags or [at]}

    def _found_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
        return self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]

    # --- step -------------------------------------------------------------------------------------------------------

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscales the gradients and calls ``optimizer.step(*args, **kwargs)``, or skips it if one is inf or nan.

        Host sync: one, for any number of devices. None for optimizers with ``_step_supports_amp_scaling``, such as
        torch's with ``fused=True``: they read the attributes ``grad_scale`` and ``found_inf`` (0.0 or 1.0). If these
        cannot skip (a group that is not fused, or the first step of torch's fused SGD with dampening), one host sync.

        After the step, gradients in ``.grad`` are unscaled; a step that the device skipped leaves them scaled. Without
        any gradient nothing changes, and ampctx warns once.

        Args:
            optimizer: any torch optimizer.
            *args, **kwargs: passed to its ``step``. No closure.

        Returns:
            The result of ``optimizer.step``, None for a skipped step.

        Raises:
            AmpError: called twice in one iteration, or with a closure; an optimizer under amp with masters; a parameter
                with a gradient joined the optimizer after ``unscale_``.
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
            raise AmpError(
                "step() has already been called since the last update(). Call update() after the last optimizer's "
                "step(). See docs/errors.md"
                "#unscale_-has-already-been-called-on-this-optimizer-since-the-last-update."
            )
        steps, parameters = self._steps_of(optimizer), _params(optimizer)
        if state["stage"] is OptState.UNSCALED:
            self._refuse_joined(optimizer, state)
        if all(p.grad is None for p in parameters) and optimizer not in self._told_of_no_gradients:
            self._told_of_no_gradients.add(optimizer)
            logger.warning(
                "%s.step() changes nothing: none of its parameters has a gradient. The loss does not reach them, or "
                "zero_grad() ran after backward(). See docs/errors.md#no-inf-checks-were-recorded-for-this-optimizer.",
                type(optimizer).__name__,
            )
        result = None
        # None: the device decides, or a framework's override of _maybe_opt_step.
        losses: Overflowed | None
        try:
            if declares(optimizer, "_step_supports_amp_scaling") and (
                # Trust other classes. torch's optimizers may have groups that are not fused.
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
        """Raises for a parameter that joined after ``unscale_``: its gradient is scaled and not checked."""
        if state.get("unscaled", set()).issuperset(map(id, _params(optimizer))):
            return
        for g, group in enumerate(optimizer.param_groups):
            for i, p in enumerate(group["params"]):
                if p.grad is not None and id(p) not in state.get("unscaled", {id(p)}):
                    raise AmpError(
                        f"param_groups[{g}]['params'][{i}] joined the optimizer after unscale_(). Its gradient is "
                        "still scaled. Add parameters before unscale_() or after update(), or set this gradient to "
                        "None."
                    )

    def _found_inf(self, optimizer: Any, state: dict[str, Any]) -> Flags:
        """The flag of the gradients. Checks them now if ``unscale_`` did not."""
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
        """Records a step. ``losses``: those that overflowed; None if the device has decided."""
        assert self._loss_scale is not None
        assert self._loss_scale.scale is not None
        scale = self._loss_scale.scale_on(self._loss_scale.scale.device)
        known = Known({0: scale}, norm_before_clipping(grad for p in parameters if (grad := p.grad) is not None))
        if losses is None:
            found_inf = join_flags(state["found_inf_per_device"].values(), scale.device)
            if self._max_consecutive_skips is not None:
                found_inf = found_inf.ne(0).float()  # to count: a framework's sum over ranks may exceed 1
            flags = {0: (self._loss_scale, found_inf)}
            outcome = steps.left_to_device(optimizer, flags, known, found_inf, tuple, self._later(optimizer))
            steps.conclude(optimizer, outcome)
        elif losses:
            steps.skipped(optimizer, losses, known, _culprits(optimizer))
        else:
            steps.stepped(optimizer, known)

    def _later(self, optimizer: Any) -> Callable[[int], Culprits | None]:
        """Returns the search for non-finite gradients. It works while ``.grad`` still belongs to this step."""
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
        """Steps an optimizer that unscales and skips by itself."""
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
        # torch's fused CPU kernels compare with 1, so a flag summed over ranks would not skip.
        optimizer.found_inf = join_flags(state["found_inf_per_device"].values(), scale.device).ne(0).float()
        try:
            return optimizer.step(*args, **kwargs)
        finally:
            del optimizer.grad_scale
            del optimizer.found_inf

    # --- update -----------------------------------------------------------------------------------------------------

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Updates the scale from the flags of this iteration. Call it after the last ``step``. No host sync.

        If no optimizer had a gradient, the scale and its count of clean updates stay.

        Args:
            new_scale: sets the scale instead, outside of the bounds, too: a number, or a one-element tensor without
                requires_grad on the scaler's device type. None, the default: update by the flags.

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
                # First: after an exception these flags must not update the scale again.
                self._per_optimizer_states = defaultdict(fresh_optimizer_state)
                self._loss_scale.update(found_inf)
                return
            if not any(state["stage"] is OptState.STEPPED for state in states):
                raise AmpAssertionError(
                    "No inf checks were recorded prior to update. Call scaler.step(optimizer) first. "
                    "See docs/errors.md#no-inf-checks-were-recorded-for-this-optimizer."
                )
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
