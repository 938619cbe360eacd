"""torch.amp's GradScaler over ``LossScale`` and ampctx's ops, with bounds, outcomes and a stall guard.

An optimizer is READY, UNSCALED after ``unscale_`` and STEPPED after ``step``; ``update`` makes it READY again.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from operator import is_not
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.utils.weak import WeakIdRef

from ampctx._collectives import check_process_group, is_distributed
from ampctx._decorators import names_arguments
from ampctx._errors import AmpAssertionError, AmpError, AmpTypeError, AmpValueError, warn
from ampctx._saved import FORMAT, plain
from ampctx.kernels import foreach
from ampctx.kernels.foreach import FoundInf, PerDevice, join_flags, move
from ampctx.kernels.sharding import groups_of, place_grads
from ampctx.kernels.tensor_loops import dtype_of, grad_of
from ampctx.scaling import loss_scale, step_record
from ampctx.scaling.any_optimizer import align_gradients, skips_by_itself
from ampctx.scaling.loss_scale import LossScale, check_bounds, check_count, check_factor, check_scale
from ampctx.scaling.outcome import (
    DEFAULT_LENGTH,
    NO_STEP_YET,
    History,
    StepHistory,
    StepOutcome,
    culprits_later,
    culprits_of,
    params_of,
)
from ampctx.scaling.step_record import Flags
from ampctx.weights.clip import norm_before_clipping, strided_grads
from ampctx.weights.step import has_parameter

# The errors of calls at the wrong stage, as torch begins them.
_SEE = "See `ampctx explain unscale_-has-already-been-called`."
_OUT_OF_ORDER = {
    ("unscale_", OptState.UNSCALED): "unscale_() has already been called on this optimizer since the last update(). "
    f"Call unscale_, step and update once per step, after the last backward. {_SEE}",
    ("unscale_", OptState.STEPPED): "unscale_() is being called after step(). Call it before, after the last backward.",
    ("step", OptState.STEPPED): f"step() has already been called since the last update(). Call update() first. {_SEE}",
}


def _with_gradient(optimizer: Any) -> list[tuple[str, Any]]:
    places = ((g, i, p) for g, group in enumerate(optimizer.param_groups) for i, p in enumerate(group["params"]))
    return [(f"param_groups[{g}]['params'][{i}]", p) for g, i, p in places if p.grad is not None]


def _versions(optimizer: Any) -> list[tuple[Any, int]]:
    return [(WeakIdRef(p.grad), p.grad._version) for _, p in _with_gradient(optimizer)]


def _of_loss_scale(name: str, check: Any = lambda name, value: value) -> Any:
    """An attribute of torch's GradScaler, which ``LossScale`` keeps as ``name``. A disabled scaler has none."""

    def set_(self: GradScaler, value: Any) -> None:
        if self._loss_scale is not None:
            setattr(self._loss_scale, name, check(name, value))

    return property(lambda self: getattr(self._loss_scale, name), set_)


class GradScaler(torch.amp.GradScaler):
    """Scales losses, unscales gradients, skips steps on non-finite gradients and adapts the scale.

    Same calls, errors and checkpoints as ``torch.amp.GradScaler``; each loads the other's state_dict. Differences: the
    scale has bounds and hysteresis, and never reaches 0 or inf. bf16, complex and sparse gradients unscale on every
    device. ``found_inf`` is 0.0 or 1.0 with several devices, too. A step without any gradient changes nothing.

    Example::

        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    Args:
        device, init_scale, growth_factor, backoff_factor, growth_interval, enabled: as torch's, with its defaults. A
            disabled scaler passes everything through. On "cuda" without CUDA it warns, and is disabled.
        min_scale, max_scale: bounds of the scale.
        hysteresis: overflows in a row before the scale falls.
        max_consecutive_skips: how many steps of an optimizer in a row may be skipped, at least 1. After one more
            ``step`` raises AmpStallError; a few steps later if the device skips, for which the host does not wait.
            None: any number.
        process_group: a ``torch.distributed.ProcessGroup`` whose ranks skip steps and change the scale together. Needed
            if ranks hold different gradients. Each step of an optimizer is then an all_reduce of six numbers, in which
            every rank must take part: else AmpRankError, also if the scales differ. Over NCCL the first and every
            1,000th is a host sync. Such a scaler cannot be pickled. Ranks of a DTensor mesh always agree.
        history: the number of latest steps that ``history()`` keeps for each optimizer. 0: none.

    Raises:
        AmpTypeError, AmpValueError, AmpError: an invalid argument, by name.
    """

    @names_arguments
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
        device = torch.device(device).type
        if enabled and device == "cuda" and not torch.cuda.is_available():
            warn("GradScaler is enabled, but CUDA is not available. Disabling. Pass 'cpu': ampctx explain GradScaler")
            enabled = False
        self._loss_scale: Any = None  # a LossScale, if enabled
        self._recording: tuple[int | None, int] = (None, 0)  # of StepRecord
        if enabled:
            limit = None if (n := max_consecutive_skips) is None else check_count("max_consecutive_skips", n, 1)
            self._recording = limit, check_count("history", history, 0)
            check_process_group(process_group)
            rule = growth_factor, backoff_factor, growth_interval, min_scale, max_scale, hysteresis
            self._loss_scale = LossScale(init_scale, True, *rule)
            self._loss_scale.process_group = process_group
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, bool(enabled))
        self._steps: Any = weakref.WeakKeyDictionary()  # {optimizer: StepRecord}

    _scale = _of_loss_scale("scale")
    _growth_tracker = _of_loss_scale("growth_tracker")
    _init_scale = _of_loss_scale("init_scale", check_scale)
    _init_growth_tracker = _of_loss_scale("init_growth_tracker")
    _growth_factor = _of_loss_scale("growth_factor", check_factor)
    _backoff_factor = _of_loss_scale("backoff_factor", check_factor)
    _growth_interval = _of_loss_scale("growth_interval", partial(check_count, least=1))

    def __repr__(self) -> str:
        if (scale := self._loss_scale) is None:
            return "GradScaler(enabled=False)"
        return f"GradScaler({self._device!r}, scale {scale}, growth_interval={scale.growth_interval})"

    def scale(self, outputs: Any) -> Any:
        """Multiplies ``outputs`` by the scale. No host sync.

        Args:
            outputs: a tensor of any shape, or lists, tuples and iterables of tensors, nested, else AmpValueError. Lists
                and tuples keep their type, other iterables become iterators. A disabled scaler returns ``outputs``.
        """
        if not self._enabled:
            return outputs
        for steps in self._steps.values():
            steps.epoch += 1
        for state in self._per_optimizer_states.values():  # other gradients may come
            state.pop("done", None)
        return self._scaled(outputs)

    def _scaled(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if self._scale is None:
                with torch.inference_mode(False):  # else no backward could use the scale later
                    self._lazy_init_scale_growth_tracker(value.device)
            return value * move(self._scale, value.device)
        if not isinstance(value, Iterable) or isinstance(value, (str, bytes, Mapping)):
            raise AmpValueError(f"outputs must be a Tensor or an iterable of Tensors, got {type(value).__name__}")
        parts = map(self._scaled, value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*parts)
        return type(value)(parts) if isinstance(value, (list, tuple)) else parts

    # --- unscale ----------------------------------------------------------------------------------------------------

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients of ``optimizer`` by the scale in place, and checks for inf and nan. No host sync.

        Optional: ``step`` unscales otherwise. Call it once per step, after the last backward, to clip or read unscaled
        gradients: fp32, bf16, fp64 or complex. Coalesces sparse ones in ``.grad``.

        Raises:
            AmpError: called twice, or after ``step``, in one iteration; an optimizer under amp with masters (O2, O5).
            AmpAssertionError: ``scale`` was never called. AmpValueError: an fp16 gradient; nothing has changed then.
        """
        if not self._enabled:
            return
        with self._begun("unscale_", optimizer):
            self._check(optimizer, unscales=True)

    @contextmanager
    def _begun(self, call: str, optimizer: Any) -> Iterator[dict[str, Any]]:
        """Checks that the optimizer may be unscaled or stepped. Gives its state. After an exception gradients that stay
        as they are then are for a second try. Others are scaled."""
        # amp marks the step of an optimizer with masters.
        if (refuse := getattr(getattr(optimizer, "step", None), "refuse_grad_scaler", None)) is not None:
            refuse()
        self._check_scale_growth_tracker(call)
        states, key = self._per_optimizer_states, id(optimizer)
        if "kept" in states[key] and states[key]["kept"] != _versions(optimizer):
            del states[key]
        if len(states) > (key in states):
            self._follow_others(call, optimizer)
        state = states[key]
        if error := _OUT_OF_ORDER.get((call, state["stage"])):
            raise AmpError(error)
        if "unscaled" in state and not state["unscaled"].issuperset(map(id, params_of(optimizer))):
            for where in (where for where, p in _with_gradient(optimizer) if id(p) not in state["unscaled"]):
                raise AmpError(
                    f"{where} joined the optimizer after unscale_(). Its gradient is still scaled. Add parameters "
                    "before unscale_() or after update(), or set this gradient to None."
                )
        try:
            yield state
        except BaseException:
            state["kept"] = _versions(optimizer)
            raise
        state.pop("kept", None)

    def _follow_others(self, call: str, optimizer: Any) -> None:
        """Takes the flags of gradients that were unscaled through another optimizer, such as a wrapper of this one.
        AmpError where they would be divided twice."""
        states, key = self._per_optimizer_states, id(optimizer)
        if key in states and states[key]["stage"] is not OptState.READY:
            return
        for state in [state for other, state in states.items() if other != key and "done" in state]:
            if (done := set(map(id, state["done"]))).isdisjoint(map(id, params_of(optimizer))):
                continue
            with_gradient = _with_gradient(optimizer)
            if not (shared := [where for where, p in with_gradient if id(p) in done]):
                continue
            if call != "step" or state["stage"] is OptState.STEPPED or len(shared) < len(with_gradient):
                raise AmpError(
                    f"{call}({type(optimizer).__name__}): the gradient of {shared[0]} was unscaled through another "
                    "optimizer since the last update(), and would be divided by the scale twice. Pass unscale_ and "
                    f"step the same optimizer, once, and give a parameter to one optimizer. {_SEE}"
                )
            states[key] = dict(state)

    @torch.no_grad()
    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor | None, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """``grad *= inv_scale``, or with None the check alone. Returns a flag for each device with gradients, starting
        from ``found_inf``. No host sync. Frameworks override this method: its arguments and their order must stay."""
        parameters = params_of(optimizer)
        grads = list(filter(partial(is_not, None), map(grad_of, parameters)))
        if not allow_fp16 and torch.float16 in set(map(dtype_of, grads)):
            where, p = next(found for found in _with_gradient(optimizer) if found[1].grad.dtype == torch.float16)
            raise AmpValueError(
                f"Attempting to unscale FP16 gradients. {where} of shape {tuple(p.shape)} has one. Keep the parameters "
                "in fp32 and run the forward under autocast, or let amp.initialize(model, optimizer, opt_level='O2') "
                "keep fp32 masters of them. See `ampctx explain attempting-to-unscale-fp16-gradients`."
            )
        start = found_inf if inv_scale is None else found_inf.clone()
        # A gradient of each device, by its number: device objects take longer.
        some = dict(zip(map(Tensor.get_device, grads), grads, strict=True)).values()
        flags = {}
        for grad in some:
            flags[grad.device] = start if grad.device == start.device else move(start, grad.device)
        grads = strided_grads(parameters)
        raised = FoundInf()
        raised.per_device = flags
        if inv_scale is None:
            foreach.unscale_l2norms_of(grads, raised, 1.0, per_tensor=False)
        else:
            foreach.scale(grads, grads, raised, PerDevice(inv_scale))
        return flags

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
        """Checks the gradients, fp16 included, for inf and nan without changing them. No host sync."""
        self._check_scale_growth_tracker("_check_inf_per_device")
        return self._check(optimizer)

    def _check(self, optimizer: Any, unscales: bool = False) -> dict[torch.device, Tensor]:
        scale, params, state = self._loss_scale.scale, params_of(optimizer), self._per_optimizer_states[id(optimizer)]
        is_ours = getattr(self._unscale_grads_, "__func__", None) is GradScaler._unscale_grads_
        factor = scale.reciprocal() if unscales else None if is_ours else torch.ones_like(scale)
        if is_distributed():
            place_grads(params)
            meshes = groups_of(params)
            if meshes or self._loss_scale.process_group is not None:
                state["meshes"] = meshes  # over which ``_flags`` will join the flags
        after = {"stage": OptState.UNSCALED, "unscaled": set(map(id, params)), "done": params} if unscales else {}
        found_inf = torch.zeros((), dtype=torch.float32, device=scale.device)
        flags = self._unscale_grads_(optimizer, factor, found_inf, not unscales)
        state.update(after, found_inf_per_device=flags)  # at once, for a second try after an interrupt
        return flags

    def _flags(self, state: dict[str, Any]) -> Flags:
        """The flag of an optimizer's gradients on the scale's device. The same on all ranks, by one all_reduce."""
        scale, flags = self._loss_scale, state["found_inf_per_device"]
        found_inf = join_flags(flags.values(), scale.scale.device)
        if "meshes" in state:
            found_inf = scale.agreed(found_inf, state["meshes"], "GradScaler")
            # A rank without gradients has the flag of the others.
            state["found_inf_per_device"] = {d: move(found_inf, d) for d in flags or [found_inf.device]}
            del state["meshes"]
        return {0: (scale, found_inf)}

    # --- step -------------------------------------------------------------------------------------------------------

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscales the gradients and calls ``optimizer.step(*args, **kwargs)``, or skips it if one is inf or nan.

        Host sync: one, for any number of devices. None for optimizers with ``_step_supports_amp_scaling``, such as
        torch's with ``fused=True``, which read ``grad_scale`` and ``found_inf``; if these cannot skip (a group that is
        not fused, or the first step of torch's fused SGD with dampening), one.

        After the step, gradients in ``.grad`` are unscaled; a step that the device skipped leaves them scaled. Without
        any gradient nothing changes, and ampctx warns once. ``args`` and ``kwargs`` must hold no closure.

        Returns:
            The result of ``optimizer.step``, None for a skipped step.

        Raises:
            AmpError: called twice in one iteration, or with a closure; an optimizer under amp with masters; a parameter
                with a gradient joined the optimizer after ``unscale_``. AmpAssertionError: ``scale`` was never called.
            AmpStallError: more than ``max_consecutive_skips`` steps in a row were skipped, this one included.
        """
        if not self._enabled:
            result = optimizer.step(*args, **kwargs)
            self._record(optimizer).outcome = StepOutcome()
            return result
        if "closure" in kwargs or any(map(callable, args)):
            raise AmpError(
                "Closure use is not currently supported if GradScaler is enabled. Run backward before step()."
            )
        with self._begun("step", optimizer) as state:
            steps, by_device, result = self._record(optimizer), skips_by_itself(optimizer), None
            if state["stage"] is OptState.READY:
                self._check(optimizer) if by_device else self.unscale_(optimizer)
            flags, losses = self._flags(state), None
            if not by_device:
                result = self._maybe_opt_step(optimizer, state, *args, **kwargs)
                # None: a framework has replaced that method, and only the flag tells.
                losses = state.pop("overflowed", None)
            elif steps.limit is None or not (losses := steps.overflowed_at_limit(flags) or None):
                result = self._step_on_device(optimizer, state, flags[0][1], *args, **kwargs)
            state["stage"], state["done"] = OptState.STEPPED, (params := params_of(optimizer))
            scales, norm = {0: self._loss_scale.scale.clone()}, norm_before_clipping(map(grad_of, params))
            if losses is not None:
                steps.decided(optimizer, losses, scales, norm, culprits_of(optimizer) if losses else ())
            else:
                later = partial(culprits_later, weakref.ref(optimizer))
                steps.conclude(optimizer, steps.left_to_device(flags, scales, norm, flags[0][1], later))
        if not state["found_inf_per_device"] and not steps.told:
            steps.told = True
            warn(
                f"{type(optimizer).__name__}.step() changes nothing: none of its parameters has a gradient. No loss "
                "reaches them, or zero_grad() ran after backward(). See `ampctx explain no-inf-checks-were-recorded`."
            )
        return result

    def _record(self, optimizer: Any) -> Any:
        if optimizer not in self._steps:
            self._steps[optimizer] = step_record.StepRecord(*self._recording)
        return self._steps[optimizer]

    def _maybe_opt_step(
        self, optimizer: torch.optim.Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        optimizer_state["overflowed"] = step_record.overflowed(self._flags(optimizer_state))
        return None if optimizer_state["overflowed"] else optimizer.step(*args, **kwargs)

    def _step_on_device(
        self, optimizer: Any, state: dict[str, Any], found_inf: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if has_parameter(getattr(type(optimizer), "step", None), "grad_scaler"):
            warnings.warn(
                "GradScaler is going to stop passing itself as a keyword argument: torch deprecated the parameter "
                f"grad_scaler of {type(optimizer).__name__}.step. Read self.grad_scale and self.found_inf instead.",
                FutureWarning,
                stacklevel=3,
            )
            return optimizer.step(*args, **{**kwargs, "grad_scaler": self})
        given = getattr(optimizer, "grad_scale", None)
        if state["stage"] is OptState.READY:
            scale = self._loss_scale.scale
            given = scale.clone() if given is None else scale * given
        align_gradients(optimizer)
        # torch's fused CPU kernels compare with 1, and a framework's sum over ranks may exceed it.
        optimizer.grad_scale, optimizer.found_inf = given, found_inf.ne(0).float()
        try:
            return optimizer.step(*args, **kwargs)
        finally:
            del optimizer.grad_scale
            del optimizer.found_inf

    # --- update -----------------------------------------------------------------------------------------------------

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Updates the scale from the flags of this iteration, after the last ``step``. No host sync. Without a gradient
        the scale and its count of clean updates stay.

        Args:
            new_scale: sets the scale instead, outside of the bounds, too: a number, or a one-element tensor without
                requires_grad on the scaler's device type.

        Raises:
            AmpAssertionError: no optimizer was unscaled with gradients, or stepped; a tensor that does not fit.
            AmpTypeError, AmpValueError: a number that is not > 0 and finite.
        """
        if not self._enabled:
            return
        self._check_scale_growth_tracker("update")
        scale, states = self._loss_scale, self._per_optimizer_states
        if new_scale is not None:
            t: Any = new_scale
            if isinstance(t, Tensor) and (t.device.type != self._device or t.numel() != 1 or t.requires_grad):
                raise AmpAssertionError(
                    f"new_scale should be a float or a 1-element tensor on {self._device} with requires_grad=False, "
                    f"got {t.numel()} on {t.device} with requires_grad={t.requires_grad}"
                )
            scale.set(new_scale)
            return states.clear()
        checked = [state for state in states.values() if state["found_inf_per_device"] or "meshes" in state]
        flags = [self._flags(state)[0][1] for state in checked]
        if not flags and not any(state["stage"] is OptState.STEPPED for state in states.values()):
            raise AmpAssertionError(
                "No inf checks were recorded prior to update. Call scaler.step(optimizer) first. "
                "See `ampctx explain no-inf-checks-were-recorded`."
            )
        states.clear()  # first: after an exception these flags must not update the scale again
        if flags:
            scale.update(join_flags(flags, flags[0].device))

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        scale = self._loss_scale
        if scale.scale is None or scale.growth_tracker is None:
            raise AmpAssertionError(
                f"Attempted {funcname} but {'_scale' if scale.scale is None else '_growth_tracker'} is None. Call "
                "scaler.scale(loss).backward() before it. See `ampctx explain attempted-step-but-_scale-is-none`."
            )
        return scale.scale, scale.growth_tracker

    # --- outcomes of steps, checkpoints -----------------------------------------------------------------------------

    def outcome(self, optimizer: torch.optim.Optimizer) -> StepOutcome:
        """Returns the outcome of the latest ``scaler.step(optimizer)``. No host sync.

        Names of parameters are their places in the optimizer, or the names passed to it. With a disabled scaler every
        step counts as stepped. Reading an attribute may be a host sync.
        """
        steps = self._steps.get(optimizer)
        return NO_STEP_YET if steps is None else steps.outcome

    def history(self, optimizer: torch.optim.Optimizer | None = None, last: int | None = None) -> History:
        """Returns the latest steps as plain lists: scales, skips and gradient norms. All loss ids are 0. One host sync.

        A disabled scaler keeps no steps. A pickle or a copy starts with an empty history.

        Args:
            optimizer: optional if the scaler has stepped only one, else AmpError.
            last: the largest number of steps to return. None: all that ``GradScaler(history=...)`` keeps. Not an int
                >= 0: AmpTypeError, AmpValueError.
        """
        if optimizer is None and len(self._steps) > 1:
            raise AmpError(f"GradScaler.history: {len(self._steps)} optimizers were stepped. Pass one of them.")
        steps = next(iter(self._steps.values()), None) if optimizer is None else self._steps.get(optimizer)
        return (StepHistory(0) if steps is None else steps.history).lists(last)

    def state_dict(self) -> dict[str, Any]:
        """Returns torch's five entries, those of bounds and hysteresis, and "format"; {} if disabled. Host sync."""
        if (scale := self._loss_scale) is None:
            return {}
        own = {name: getattr(scale, name) for name in ("min_scale", "max_scale", "hysteresis")}
        return {**super().state_dict(), **own, "_hysteresis_tracker": scale.hysteresis_left(), "format": FORMAT}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a ``state_dict()`` of this class, of torch's GradScaler, or of ``amp`` with one loss scale.

        torch's state has no bounds and hysteresis: these stay as constructed. From ``amp.state_dict()`` of apex or
        ampctx it loads scale and counter only. ``ampctx_apex.checkpoints.to_grad_scaler_state`` picks one of several
        scales. An invalid state changes nothing. A disabled scaler loads nothing.

        Raises:
            AmpError: an empty dict, as a disabled scaler saves.
            AmpKeyError, AmpTypeError, AmpValueError: a missing, unknown or invalid entry; several loss scales.
        """
        if (scale := self._loss_scale) is None:
            return
        if loss_scale.is_amp_state(state_dict):
            return scale.load_state_dict(loss_scale.only_amp_entry(state_dict))
        saved = loss_scale.read_grad_scaler_state(state_dict)
        own = {name: plain(value) for name, value in state_dict.items()}
        bounds = check_bounds(own.get("min_scale", scale.min_scale), own.get("max_scale", scale.max_scale))
        hysteresis = check_count("hysteresis", own.get("hysteresis", scale.hysteresis), 1)
        left = check_count("_hysteresis_tracker", own.get("_hysteresis_tracker", hysteresis), 0)
        super().load_state_dict(saved)
        (scale.min_scale, scale.max_scale), scale.hysteresis, scale.until_check = bounds, hysteresis, 0
        scale.set_hysteresis_left(left)

    def __getstate__(self) -> dict[str, Any]:
        if self._enabled and self._per_optimizer_states:
            raise AmpAssertionError(
                "A GradScaler instance may only be pickled at the beginning of an iteration, or at the end after "
                "scaler.update()."
            )
        return {k: v for k, v in vars(self).items() if k != "_steps"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _steps=weakref.WeakKeyDictionary())
