"""One optimizer under amp: its replaced methods, and its step, told from top to bottom in ``OptimizerBinding._step``.

``initialize`` replaces methods on the instance (``OptimizerBinding.__init__`` names them), so that the program's object
stays the same. Closures, and the two steps of SAM, are in ``closures``.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from ampctx._data_writes import message
from ampctx._decorators import outside_of_graphs, without_grad
from ampctx._errors import AmpError, listed
from ampctx.amp import closures, culprits
from ampctx.amp.hints import Hints, tell
from ampctx.amp.log import SkipLog
from ampctx.amp.methods import CHECKPOINT, as_copied, called_by, called_by_grad_scaler, replace, weak_method
from ampctx.amp.misuse import LeftGrads, refuse_sharded_since, steps_one_of
from ampctx.casts.model_watch import ParameterNames
from ampctx.casts.switch import AS_IT_IS, CastSwitch
from ampctx.kernels import foreach
from ampctx.kernels.foreach import Factor, FoundInf, PerDevice, move
from ampctx.kernels.sharding import values_of
from ampctx.kernels.tensor_loops import stored_grad
from ampctx.scaling.any_optimizer import align_gradients, skips_by_itself
from ampctx.scaling.loss_scale import LossScale
from ampctx.scaling.step_record import OUTSIDE_OF_BLOCKS, FoundInfFlags, Overflowed, StepRecord, overflowed
from ampctx.weights.clip import norm_before_clipping
from ampctx.weights.frames import Frames
from ampctx.weights.masters import LOADED, MasterParams
from ampctx.weights.step import Step, has_parameter

_NOTHING = Step()


class OptimizerBinding:
    """One optimizer under amp.

    Attributes:
        masters, gradients: its parameters and their gradients.
        loss_scales: those of its ``initialize``.
        steps: decides about skips and records the steps.
        inside: the optimizer's own code runs, so its calls of replaced methods pass through. released: after ``reset``.
        restore_unperturbed: between SAM's two steps, restores the unperturbed weights. first_step_skipped: SAM's first
            step was skipped, and its second is to come.
    """

    def __init__(
        self,
        optimizer: Any,
        masters: MasterParams,
        loss_scales: list[LossScale],
        casts: CastSwitch,
        steps: StepRecord,
        names: ParameterNames,
        hints: list[Hints],
        log: SkipLog,
    ) -> None:
        self.masters, self.gradients, self.loss_scales = masters, Frames(masters), loss_scales
        self.flags, self.steps, self.casts = FoundInfFlags(), steps, casts
        self.hints, self.log, self.left_grads = hints, log, LeftGrads()
        # A GradScaler scales for the optimizer. A loop that uses one does so from the first steps.
        self.by_scaler, self._first_steps = False, 2
        self.inside = self.released = self.first_step_skipped = False
        self.restore_unperturbed: Callable[[], None] | None = None
        # What the running step is given; a closure changes it.
        self.given = _NOTHING
        # Whether the device decides about skips. Of optimizers that take no ``Step``, each step asks.
        self._is_by_device = masters.takes_step and skips_by_itself(optimizer)
        self._optimizer: Callable[[], Any] = weakref.ref(optimizer)
        self._names_of = names
        self._was_of_models = steps_one_of(self, names)
        methods: dict[str, Callable] = {"step": self._step, "zero_grad": self._zero_grad}
        methods |= {"add_param_group": self._add_param_group, "__reduce_ex__": self._reduce_ex}
        own = {"state_dict": self._state_dict, "load_state_dict": self._load_state_dict}
        own |= dict.fromkeys(("eval", "train"), self._swap_weights)  # of optimizers that average
        methods |= {name: method for name, method in own.items() if callable(getattr(optimizer, name, None))}
        if hasattr(optimizer, "first_step") and hasattr(optimizer, "second_step"):
            methods["first_step"] = functools.partial(closures.first_step, self)
            methods["second_step"] = functools.partial(closures.second_step, self)
        # Methods that the instance had. None for those of its class, even if an LR scheduler has wrapped them.
        self._formers = {n: None if hasattr(type(optimizer), n) else vars(optimizer).get(n) for n in methods}
        self._replaced = ExitStack()
        try:
            for name, method in methods.items():
                self._replaced.callback(replace(optimizer, name, method))
            step = vars(optimizer)["step"]
            step.refuse_grad_scaler = step.__func__.refuse_grad_scaler = weak_method(self.refuse_grad_scaler)
            step.factors_on = step.__func__.factors_on = weak_method(self.factors_on)
        except BaseException:
            self.release()
            raise

    @property
    def optimizer(self) -> Any:
        return self._optimizer()

    # --- blocks -------------------------------------------------------------------------------------------------------

    def refuse(self, call: str) -> None:
        """Raises AmpError where a step, or the first of nested blocks, would use gradients that are not whole."""
        if self.gradients.depth:
            raise AmpError(
                f"{call} was called inside a scale_loss block. Gradients are still scaled there. Move the call after "
                "the block. See `ampctx explain was-called-inside-a-scale_loss-block`."
            )
        if self.gradients.incomplete:
            raise AmpError(
                f"{call} was called after an exception at the end of a scale_loss block, so gradients are incomplete. "
                "Call optimizer.zero_grad() and repeat this step's backward passes."
            )

    def refuse_to_restore(self, call: str) -> None:
        """Raises AmpError inside a block, whose end needs what the call would replace."""
        if self.gradients.depth:
            raise AmpError(
                f"{call} was called inside a scale_loss block. The state is incomplete there. Leave the block first."
            )

    def refuse_to_save(self, call: str) -> None:
        """Raises AmpError between SAM's two steps."""
        if self.restore_unperturbed is not None:
            raise AmpError(
                f"{call} was called between first_step() and second_step(). The weights are perturbed there. Save "
                "after second_step()."
            )

    def enter(self, scale: Factor, inv_scale: Factor) -> None:
        """Prepares the backward of a scale_loss block. Under no_grad."""
        frames = self.gradients.frames
        is_idle = not frames
        if self.released:
            raise AmpError(
                "amp.scale_loss was called after amp.reset(), which left this optimizer. Call amp.initialize again."
            )
        if self.gradients.incomplete and (is_idle or frames[0].is_window):
            self.refuse("amp.scale_loss")
        self.steps.epoch += 1
        # Written weights or masters do not matter here: the step and the next forward see them.
        is_clear = is_idle and self.masters.is_as_before(weights=False)
        if not is_clear:
            self.follow_groups()
            if self.masters.unsure or self.masters.ahead:
                self._catch_up(weights_final=True, gradients=False)
            if is_idle and self.gradients.may_have_outside_grads():
                self._collect()
        self.left_grads.blocks += 1
        if is_idle and (self.left_grads.marks or self.left_grads.joined):
            self.left_grads.block_begins(self.masters.params_without_master)
        if self.gradients.plan is None:
            self.masters.check()
        self.gradients.enter(scale, inv_scale, is_clear)

    def abandon(self, depth: int, ending: bool) -> None:
        """Ends a block that raised, see ``Frames.abandon``."""
        self.gradients.abandon(depth, ending)
        self.undo_first_step()  # the step that it began cannot be completed

    def undo_first_step(self) -> None:
        if self.restore_unperturbed is not None:
            self.restore_unperturbed()
            self.masters.copy_to_model()
            self.restore_unperturbed = None  # last: after an exception it can run again

    # --- between blocks -----------------------------------------------------------------------------------------------

    @outside_of_graphs
    @without_grad
    def refresh(self) -> None:
        """Takes over what happened outside blocks: changed groups, written weights, plain backwards. No host sync."""
        # A broadcast of weights may come before the first block. Gradients of delayed blocks stay scaled.
        self._catch_up(weights_final=False, gradients=self.gradients.is_idle)

    def _catch_up(self, weights_final: bool, gradients: bool = True) -> None:
        self.follow_groups()
        self.masters.resync(may_wait=True)
        if self.masters.unsure:
            self.masters.take_broadcast(weights_final)
        if gradients and self.gradients.may_have_outside_grads():
            self._collect()

    def _collect(self) -> None:
        """Unscales and checks gradients of a plain backward or of delayed blocks."""
        window = self.gradients.window
        loss_id, scale = (OUTSIDE_OF_BLOCKS, self.loss_scales[0]) if window is None else window.loss
        try:
            found_inf = self.gradients.collect(self.is_unchecked)
            # A window ends at the same step on every rank, with or without gradients, so ranks agree on its flag here.
            groups = [] if window is None else scale.groups_with(self.masters.groups)
            if not found_inf.per_device and not groups:
                return
            flag = found_inf.joined(next(iter(found_inf.per_device), self._device()))
            if window is None:
                if any(scale.dynamic for scale in self.loss_scales):
                    self.flags.add(loss_id, scale, flag)
            elif scale.dynamic:
                flag = scale.agreed(flag, self.masters.groups, "optimizer.step()")
                self.flags.add(loss_id, scale, flag)
                scale.tell(flag)
                scale.update(flag)
        except BaseException:
            # Masters may have some of these gradients already, and they may be non-finite.
            self.gradients.incomplete = True
            raise

    def follow_groups(self) -> None:
        if not self.masters.is_current():
            # Gradients from before may be scaled.
            drop = any(not scale.is_identity and scale.scale is not None for scale in self.loss_scales)
            self.masters.follow(drop)
            names, self.masters.dropped_grads = self.masters.dropped_grads, []
            if names:
                self.log.say(
                    ("dropped", id(self), *names),
                    f"{type(self.optimizer).__name__}.step(): {listed(names)} joined the optimizer with a gradient "
                    "from before, of an unknown loss scale. ampctx dropped it. Add parameters before their backward.",
                )

    def _device(self) -> torch.device:
        return next((p.device for p in self.params()), torch.device("cpu"))

    def is_unchecked(self) -> bool:
        """Whether gradients of parameters without masters still need a check: a scale is dynamic, no block did it."""
        return self.flags.by_loss.keys() <= {OUTSIDE_OF_BLOCKS} and any(scale.dynamic for scale in self.loss_scales)

    @without_grad
    def ready(self, before_closure: bool = False) -> None:
        """Before a step: everything is unscaled and checked. Ranks of a process group or a mesh agree on gradients that
        no block has checked: with or without these, because ranks may differ in that."""
        if self.gradients.frames or not self.masters.is_as_before(weights=True):
            self._catch_up(weights_final=True)
        if len(LOADED):
            LOADED.clear()
        if self.log.verbosity > 0 and (names := self.masters.written_through_data()):
            self.log.say(("data", id(self)), f"amp: {message(names)}")
        flags, scale = self.flags.by_loss, self.loss_scales[0]
        # Gradients that an earlier step has left and no block has added to. A closure may zero them first.
        if self.gradients.stepped and not before_closure and self.is_unchecked():
            found_inf = FoundInf()
            if grads := [values_of(p.grad) for p in self.masters.params_without_master if p.grad is not None]:
                foreach.l2norm(grads, found_inf)
                self.flags.add(OUTSIDE_OF_BLOCKS, scale, found_inf.joined(grads[0].device))
        groups = self.masters.groups
        agrees = scale.dynamic and (groups or scale.process_group is not None)
        if agrees and (not flags or OUTSIDE_OF_BLOCKS in flags):
            default = scale, torch.zeros((), dtype=torch.float32, device=self._device())
            _, flag = flags.get(OUTSIDE_OF_BLOCKS, default)
            flags[OUTSIDE_OF_BLOCKS] = (scale, scale.agreed(flag, groups, "optimizer.step()"))
        if self.hints and not before_closure:
            tell(self.hints, "stepping", self)

    def check_misuse(self, has_closure: bool = False) -> None:
        """Raises AmpError if an enabled GradScaler steps an optimizer with masters, another block has left scaled
        gradients, or the model has other parameters by now. ``has_closure``: it may zero gradients first."""
        if self.left_grads.marks and not has_closure:
            self.follow_groups()
            self.left_grads.step_begins(self)
        if self._first_steps:
            self._first_steps -= 1
            if called_by_grad_scaler():
                self.refuse_grad_scaler()
            if self._was_of_models:
                refuse_sharded_since(self, self._names_of)

    # --- the step -----------------------------------------------------------------------------------------------------

    def _step(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """One ``optimizer.step()``: refuses what would go wrong, makes sure that all gradients are unscaled and
        checked, asks who decides about a skip, steps or not, and records it."""
        if self.inside or self.released:
            return original(*args, **kwargs)
        if CHECKPOINT in sys.modules and not self.optimizer.state and called_by():
            # It makes missing state by a step of zeros. With masters, ``_state_dict`` refuses what follows.
            return None if self.masters.pairs else self.run(original, *args, **kwargs)
        if self.gradients.frames or self.gradients.incomplete:
            self.refuse("optimizer.step()")
        closure = args[0] if args else kwargs.pop("closure", None)
        args = args[1:]
        if self._first_steps or self.left_grads.marks:
            self.check_misuse(closure is not None)
        self.steps.epoch += 1
        self.flags.taken = None
        try:
            if closure is not None:
                return closures.step(self, original, closure, args, kwargs)
            self.ready()
            if self._is_by_device or self.device_decides():
                # The host asks only whether this would be one skip too many in a row.
                if self.steps.limit is not None and (losses := self.steps.overflowed_at_limit(self.flags.by_loss)):
                    return self.decided(losses)
                return self.step_on_device(original, None, args, kwargs)
            if losses := overflowed(self.flags.by_loss):
                return self.decided(losses)
            result = self.run(original, *((None, *args) if args else ()), **kwargs)
            self.decided()
            return result
        except BaseException:
            self.flags.give_back()
            raise

    def run(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """Runs the optimizer's own code with casts off. Afterwards, also after an exception, model weights are the
        rounded masters."""
        before, masters = self.inside, self.masters
        try:
            masters.begin()
            self.inside = True
            with self.casts.suspended() if self.casts.undo else AS_IT_IS:
                result = original(*args, **kwargs)
            self.inside = before
            if masters.ahead:
                masters.copy_to_model()
            return result
        except BaseException:
            self.inside = before
            masters.copy_to_model()
            raise

    def device_decides(self, before_backward: bool = False) -> bool:
        optimizer = self._optimizer()
        # Not where torch's former protocol for scalers decides.
        return not has_parameter(type(optimizer).step, "grad_scaler") and skips_by_itself(optimizer, before_backward)

    def step_on_device(self, original: Callable, evaluate: Callable | None, args: tuple, kwargs: dict) -> Any:
        """Gives the flags to an optimizer that skips by itself, runs it, and records the outcome, which the host may
        not know yet. Host sync only with hooks."""
        optimizer, flags, takes = self._optimizer(), self.flags, self.masters.takes_step
        own = vars(optimizer)
        former = {"found_inf": own["found_inf"]} if "found_inf" in own else {}
        try:
            # Before a closure, too: an optimizer that never evaluates it steps the gradients that are there.
            self.offer(former.get("found_inf"))
            if takes:
                kwargs["given"] = (lambda: self.given) if evaluate else self.given
            result = self.run(original, *((evaluate, *args) if evaluate or args else ()), **kwargs)
            step, is_external = self.given, former.get("found_inf") is not None
            scales, flags.scales_used = flags.scales_used, {}
            used = step.found_inf.value if step.found_inf is not None else own.get("found_inf")
            later = functools.partial(culprits.later, weakref.ref(self), self.masters.place.checked)
            now, norm = functools.partial(culprits.now, self), self._grad_norm(step.pending)
            outcome = self.steps.left_to_device(flags.by_loss, scales, norm, used, later, is_external, step.counts, now)
            self.given = _NOTHING
            self.masters.drop_grads()
            if not takes:
                self._take_back(former)
            self.gradients.stepped = True
            flags.clear()
        except BaseException:
            self._take_back(former)  # again, after an interrupt: a flag that stays would skip all steps
            raise
        self.steps.conclude(optimizer, outcome)
        return result

    def _take_back(self, former: dict[str, Any]) -> None:
        self.given, own = _NOTHING, vars(self._optimizer())
        own.pop("found_inf", None)
        own.update(former)

    def offer(self, found_inf: Tensor | float | None) -> None:
        """Sets ``given``, or the attribute ``found_inf``, to the flags of all losses and the program's own."""
        optimizer, masters, by_loss, flag = self._optimizer(), self.masters, self.flags.by_loss, None
        for _, raised in by_loss.values():
            flag = raised if flag is None else torch.maximum(flag, move(raised, flag.device))
        if found_inf is not None:  # 0-d, and 0 or 1, because torch's CPU kernels compare with 1
            own = found_inf if isinstance(found_inf, Tensor) else torch.tensor(found_inf, device="cpu")
            own = own.detach().reshape(()).ne(0).float()
            flag = own if flag is None else torch.maximum(flag, move(own, flag.device))
        if masters.takes_step:
            counts = self.steps.counts_for(flag, by_loss)
            found = None if flag is None else PerDevice(flag)
            self.given = Step(found, masters.model_of, masters.place.pending, counts, masters.advance)
            return
        if any(group.get("fused") for group in optimizer.param_groups):
            align_gradients(optimizer)
        if flag is not None:
            optimizer.found_inf = flag

    def decided(self, losses: Overflowed | None = None) -> None:
        """Records what the host decided: a step that ran, or one that ``losses`` skip."""
        found = culprits.now(self) if losses else ()
        norm = self._grad_norm(self.masters.place.pending if losses else None)
        self.masters.drop_grads()
        self.gradients.stepped = True
        scales, self.flags.scales_used = self.flags.scales_used, {}
        self.flags.clear()
        self.steps.decided(self.optimizer, losses or [], scales, norm, found)

    def _grad_norm(self, pending: Any) -> Tensor | None:
        """The norm of the step's gradients before clipping, if a clip or a check has computed it. No host sync."""
        if pending is not None:
            return pending.norm_before_step(self.masters.params_without_master)
        return norm_before_clipping(map(stored_grad, [*self.masters.masters, *self.masters.params_without_master]))

    # --- names and factors --------------------------------------------------------------------------------------------

    def params(self) -> list[Tensor]:
        """The parameters that the optimizer steps, in order."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def has_grads(self) -> bool:
        return self.masters.place.pending is not None or any(stored_grad(p) is not None for p in self.params())

    def model_params(self) -> list[Tensor]:
        """``params`` with model parameters in the places of their masters."""
        return [self.masters.model_of.get(p, p) for p in self.params()]

    def names(self) -> list[str]:
        names = self.names_by_id()
        return [names[id(p)] for p in self.model_params()]

    def names_by_id(self) -> dict[int, str]:
        return self._names_of.of(self.optimizer, self.masters.model_of)

    def factors_on(self, device: torch.device) -> tuple[Tensor | float, Tensor | float] | None:
        """The factors of the innermost block for its loss and for its gradients. None if gradients are not scaled."""
        if all(scale.is_identity for scale in self.loss_scales):
            return None
        return tuple(f.on(device) if isinstance(f, PerDevice) else f for f in self.gradients.factors)  # type: ignore

    def refuse_grad_scaler(self) -> None:
        self.by_scaler = True
        if self.masters.pairs:
            raise AmpError(
                "a GradScaler was given an optimizer that is under amp with fp32 master weights. It would not unscale "
                "their gradients. Remove the scaler and use amp.scale_loss, which also skips steps; or use opt_level "
                "O0, O1 or O4. See `ampctx explain a-gradscaler-was-given`."
            )

    # --- the other replaced methods -----------------------------------------------------------------------------------

    def _zero_grad(self, original: Callable, *args: Any, **kwargs: Any) -> None:
        self.steps.epoch += 1
        if not self.released:
            if self.masters.ahead and not self.inside:
                self.masters.copy_to_model()
            self.follow_groups()  # a parameter that was removed may belong to another optimizer now
        original(*args, **kwargs)
        self.left_grads.zeroed()
        if not self.inside:  # else the step that runs has yet to record them
            self.flags.clear()
        self.gradients.forget()

    def _add_param_group(self, original: Callable, param_group: dict[str, Any]) -> None:
        if self.released:
            return original(param_group)
        self.follow_groups()
        original(param_group)
        groups = self.optimizer.param_groups
        try:
            self.masters.refuse_params_with_master(groups[-1])
            self.follow_groups()
        except BaseException:
            del groups[-1]
            raise

    def _state_dict(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        if self.masters.pairs and called_by():
            raise AmpError(
                "torch's get_optimizer_state_dict looks for the parameters of the optimizer in the model. This "
                f"{type(self.optimizer).__name__} steps amp's fp32 master weights instead. Use "
                "amp.get_state_dict(model, optimizer), which names them, and amp.set_state_dict. "
                "See `ampctx explain get_optimizer_state_dict`."
            )
        return original(*args, **kwargs)

    def _load_state_dict(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        if not self.released:
            self.follow_groups()  # torch casts state to the type of the parameter: that of its master
        return original(*args, **kwargs)

    def _swap_weights(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """Lets the model have the weights that ``eval`` or ``train`` writes, also where no forward of it comes next."""
        if self.inside or self.released or not self.masters.pairs:
            return original(*args, **kwargs)
        self.follow_groups()
        self.masters.resync()
        return self.run(original, *args, **kwargs)

    def _reduce_ex(self, original: Callable, protocol: Any) -> Any:
        return as_copied(original(protocol), self._formers, self.optimizer if self.masters.pairs else None)

    # --- checkpoints and the end --------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Drops gradients and their flags: a checkpoint was loaded. Between blocks."""
        self.steps.epoch += 1
        self.gradients.drop_all()
        self.flags.clear()
        self.flags.scales_used = {}
        self.restore_unperturbed, self.first_step_skipped = None, False

    def release(self) -> None:
        """Restores the optimizer as it was, with its parameters in fp32."""
        self.released = True
        self._replaced.close()
        if self.optimizer is not None:
            self.undo_first_step()
            if self.gradients.incomplete:
                self.gradients.drop_all()  # no check would refuse these sums any more
            if self.gradients.may_have_outside_grads():
                self.gradients.collect()
            self.masters.release()
