"""``OptimizerBinding``: one optimizer under amp.

``initialize`` replaces ``step``, ``zero_grad``, ``add_param_group``, ``state_dict`` and ``__reduce_ex__`` (for copies
and pickles) on the instance, so that the user's object stays the same. It also replaces ``first_step`` and
``second_step`` of SAM optimizers. ``phases.TABLE`` says which calls are allowed in which state. Closures and SAM are in
``closures``.
"""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Container
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from ampctx._compiling import outside_of_graphs, without_grad
from ampctx._errors import AmpError
from ampctx.amp import closures, torch_state
from ampctx.amp.methods import as_copied, replace, weak_method
from ampctx.amp.phases import NOT_THE_USERS, PERTURBED, READY, RELEASED, STEPPING, TABLE, Step, refusal
from ampctx.casts.model_watch import ParameterNames
from ampctx.casts.switch import CastSwitch
from ampctx.kernels import foreach
from ampctx.kernels.foreach import Factor, FoundInf, PerDevice, join_flags
from ampctx.kernels.sharding import values_of
from ampctx.kernels.tensor_loops import stored_grad
from ampctx.masters import waiting
from ampctx.masters.clip import norm_before_clipping
from ampctx.masters.gradients import BlockGradients, Phase
from ampctx.masters.lazy_grads import ModelGrads
from ampctx.masters.params import MasterParams
from ampctx.scaling.device_skips import Flags, align_gradients, asks_for_grad_scaler, skips_by_itself
from ampctx.scaling.guarded_step import (
    OUTSIDE_OF_BLOCKS,
    FoundInfFlags,
    GuardedStep,
    Known,
    Overflowed,
    overflowed,
)
from ampctx.scaling.loss_scale import LossScale
from ampctx.scaling.outcome import Culprit, Culprits, culprits_among

# Attributes that a step sets on an optimizer that skips by itself.
_OFFERED = ("found_inf", "model_params", "model_grads", "skip_counts")


class OptimizerBinding:
    """One optimizer under amp: masters, gradients, ``found_inf`` flags, steps and replaced methods."""

    def __init__(
        self,
        optimizer: Any,
        masters: MasterParams,
        loss_scales: list[LossScale],
        casts: CastSwitch,
        steps: GuardedStep,
        names: ParameterNames,
        taken: Callable[[], Container[int]],
        loop: Any,
    ) -> None:
        self.masters = masters
        self.gradients = BlockGradients(masters)
        self.loss_scales = loss_scales
        self.flags = FoundInfFlags()
        self.steps = steps
        self.casts = casts
        # ``mistakes.Loop``, which is told what the training loop does.
        self.loop = loop
        self.phase: Step = READY
        # Between SAM's two steps: restores the unperturbed weights.
        self.restore_unperturbed: Callable[[], None] | None = None
        self._optimizer: Callable[[], Any] = weakref.ref(optimizer)
        self._names_of = names
        self._taken = taken
        # Called once, when the gradients of the first step have arrived.
        self.at_first_step: list[Callable[[OptimizerBinding], None]] = []
        methods = {
            "step": self._step,
            "zero_grad": self._zero_grad,
            "add_param_group": self._add_param_group,
            "__reduce_ex__": self._reduce_ex,
        }
        if hasattr(optimizer, "state_dict"):
            methods["state_dict"] = self._state_dict
        if hasattr(optimizer, "first_step") and hasattr(optimizer, "second_step"):
            methods["first_step"] = functools.partial(closures.first_step, self)
            methods["second_step"] = functools.partial(closures.second_step, self)
        # Methods that the optimizer instance had. None for those of its class, even if an LR scheduler has wrapped
        # them.
        self._formers = {
            name: None if hasattr(type(optimizer), name) else vars(optimizer).get(name) for name in methods
        }
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

    # --- phases -------------------------------------------------------------------------------------------------------

    def refuse(self, event: str, name: str) -> None:
        """Raises AmpError if ``phases.TABLE`` does not allow the event now. ``name``: the call, for the message."""
        gradients = self.gradients
        if self.phase is READY and gradients.is_idle and not gradients.incomplete:
            return  # the table allows every event in this state
        if (why := refusal(event, gradients.phase, self.phase, gradients.incomplete)) is not None:
            raise AmpError(f"{name} {why}")

    def move_on(self, event: str) -> None:
        """Moves to the state that follows the event. RELEASED stays RELEASED."""
        if self.phase is not RELEASED:
            self.phase = TABLE[event].steps[self.phase]

    def call_own(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """Calls the optimizer's own code with casts off. Its calls of replaced methods pass through."""
        before, self.phase = self.phase, STEPPING
        try:
            with self.casts.suspended():
                return original(*args, **kwargs)
        finally:
            self.leave_stepping(before)

    def leave_stepping(self, before: Step) -> None:
        """Returns to the state ``before``. An interrupt may end ``call_own`` halfway: without this, later steps would
        pass unchecked."""
        # An exception in a block of a closure undoes first_step, and a hook may release the optimizer.
        if self.phase is STEPPING:
            self.phase = READY if before is PERTURBED and self.restore_unperturbed is None else before

    # --- blocks -------------------------------------------------------------------------------------------------------

    def begin(self, scale: Factor, inv_scale: Factor) -> None:
        """Prepares the backward of a scale_loss block. Under no_grad."""
        is_idle = self.gradients.is_idle
        self.refuse("enter" if is_idle or self.gradients.phase is Phase.WINDOW else "enter nested", "amp.scale_loss")
        self.steps.epoch += 1
        as_before = is_idle and self.masters.nothing_changed(self._optimizer())
        if not as_before:
            self._catch_up(weights_final=True, gradients=is_idle)
        self.loop.block_begins(self, is_idle)
        if not as_before:
            self.masters.check()
        self.gradients.begin(scale, inv_scale, as_before)

    def abandon(self, depth: int, committing: bool) -> None:
        """Ends a block that raised, see ``BlockGradients.abandon``. Also undoes SAM's ``first_step``: the step that it
        began cannot be completed."""
        self.gradients.abandon(depth, committing)
        self.undo_first_step()
        self.move_on("exit raised")

    def undo_first_step(self) -> None:
        if self.restore_unperturbed is not None:
            self.masters.begin_writing()
            self.restore_unperturbed()
            self.masters.copy_to_model()
            self.restore_unperturbed = None  # last: after an exception it can run again

    # --- changes outside of blocks ------------------------------------------------------------------------------------

    @outside_of_graphs
    @without_grad
    def refresh(self, weights_final: bool = False) -> None:
        """Updates masters and their gradients after changes outside scale_loss blocks. No host sync.

        ``weights_final``: no broadcast of the model's weights can still come. Before the first block one may.
        """
        self._catch_up(weights_final)

    def _catch_up(self, weights_final: bool, gradients: bool = True) -> None:
        self.masters.finish_writing()
        self.follow_groups()
        if self.masters.may_disagree:
            self.masters.round_broadcast(self._optimizer())
            self.masters.resync(weights_final)
        if gradients and self.gradients.may_have_outside_grads():
            self._collect_outside_grads()

    def _collect_outside_grads(self) -> None:
        """Unscales and checks gradients of a plain backward or of delayed blocks."""
        window = self.gradients.window
        loss_id, scale = (OUTSIDE_OF_BLOCKS, self.loss_scales[0]) if window is None else window.loss
        try:
            self._collect(window, loss_id, scale)
        except BaseException:
            # Masters may have some of these gradients already, and they may be non-finite.
            self.gradients.incomplete = True
            raise

    def _collect(self, window: Any, loss_id: int, scale: LossScale) -> None:
        found_inf = self.gradients.collect_outside_grads(self.is_unchecked)
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

    def follow_groups(self) -> None:
        """Follows the user's changes of the optimizer's groups. No host sync."""
        optimizer = self._optimizer()
        if not self.masters.agrees_with(optimizer):
            # Gradients from before may be scaled.
            drop = any(not scale.is_identity and scale.scale is not None for scale in self.loss_scales)
            self.masters.follow_groups(optimizer, self._taken, drop)
            self.loop.tell_of_dropped_grads(self)

    def _device(self) -> torch.device:
        params = (p for group in self.optimizer.param_groups for p in group["params"])
        return next((p.device for p in params), torch.device("cpu"))

    def is_unchecked(self) -> bool:
        """Whether gradients of parameters without masters still need a check: a scale is dynamic, no block did it."""
        return not self.flags.are_of_blocks and any(scale.dynamic for scale in self.loss_scales)

    @without_grad
    def check_gradients(self, before_closure: bool = False) -> None:
        """``refresh`` before a step; ranks of a process group or a mesh agree on gradients that no block has checked.

        Then they have agreed on the flags of blocks. A step without such flags always takes part, with or without
        gradients, because ranks may differ in that.
        """
        if waiting.ALL:
            self.flags.decide("optimizer.step()")
        self._catch_up(weights_final=True)
        while self.at_first_step and not before_closure:
            self.at_first_step.pop()(self)
        flags, scale = self.flags.by_loss, self.loss_scales[0]
        # Gradients that an earlier step has left and no block has added to. A closure may zero them first.
        if self.gradients.stepped and not before_closure and self.is_unchecked():
            found_inf = FoundInf()
            if grads := [values_of(p.grad) for p in self.masters.params_without_master if p.grad is not None]:
                foreach.l2norm(grads, found_inf)
                self.flags.add(OUTSIDE_OF_BLOCKS, scale, found_inf.joined(grads[0].device))
        groups = self.masters.groups
        if (
            (groups or scale.process_group is not None)
            and scale.groups_with(groups)
            and (not flags or OUTSIDE_OF_BLOCKS in flags)
        ):
            default = scale, torch.zeros((), dtype=torch.float32, device=self._device())
            _, flag = flags.get(OUTSIDE_OF_BLOCKS, default)
            flags[OUTSIDE_OF_BLOCKS] = (scale, scale.agreed(flag, groups, "optimizer.step()"))
        if not self.loop.blocks and not before_closure:
            self.loop.tell_of_no_block(self)

    # --- checkpoints and the end --------------------------------------------------------------------------------------

    def restore(self, flags: Flags, scales_used: dict[int, Factor]) -> None:
        """Drops gradients, and replaces flags and scales by those of a checkpoint. Between blocks."""
        self.steps.epoch += 1
        self.gradients.drop_all()
        self.flags.replace(flags, scales_used)
        self.restore_unperturbed = None
        self.move_on("load")

    def release(self) -> None:
        """Restores the optimizer as it was, with its parameters in fp32."""
        self.move_on("reset")
        self.flags.drop_undecided()
        self._replaced.close()
        if self.optimizer is not None:
            self.undo_first_step()
            self.gradients.drop_incomplete()
            with torch.no_grad():
                self.gradients.collect_outside_grads()
            self.masters.restore_params(self.optimizer)

    # --- steps --------------------------------------------------------------------------------------------------------

    def _step(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        if self.phase in NOT_THE_USERS:
            return original(*args, **kwargs)
        if torch_state.MODULE in sys.modules and not self.optimizer.state and torch_state.is_calling():
            # With masters, ``_state_dict`` refuses what follows, and no state must stay.
            return None if self.masters.pairs else self.call_own(original, *args, **kwargs)
        self.refuse("step", "optimizer.step()")
        closure = args[0] if args else kwargs.pop("closure", None)
        args = args[1:]
        self.loop.before_step(self, closure is not None)
        self.steps.epoch += 1
        if self.masters.pairs:
            self.loop.tell_of_edits(self)
        self.flags.forget_taken()
        try:
            if closure is not None:
                return closures.step(self, original, closure, args, kwargs)
            self.check_gradients()
            if (checked := self.gradients.checked) is None or not checked.masters:
                self.loop.tell_of_no_gradients(self)
            if self.is_left_to_device():
                if losses := self.steps.overflowed_instead_of_device(self.take_flags):
                    return self.skip(losses)
                return self.step_on_device(original, None, args, kwargs)
            if losses := overflowed(self.take_flags()):
                return self.skip(losses)
            result = self.run(original, *((None, *args) if args else ()), **kwargs)
            self.let_through()
        except BaseException:
            self.flags.give_back()
            raise
        return result

    def run(self, original: Callable, *args: Any, writes_model: bool = False, **kwargs: Any) -> Any:
        """Runs the optimizer's own code. Afterwards, also after an exception, model weights are the rounded masters.

        ``writes_model``: the optimizer writes the model's weights along with their masters.
        """
        masters, before = self.masters, self.phase
        masters.begin_writing()
        try:
            result = self.call_own(original, *args, **kwargs)
            if writes_model:
                masters.mark_written()
            else:
                masters.copy_to_model()
        except BaseException:
            self.leave_stepping(before)
            masters.copy_to_model()
            raise
        return result

    def is_left_to_device(self, before_backward: bool = False) -> bool:
        """Whether the optimizer skips by itself. ``before_backward``: see ``skips_by_itself``."""
        optimizer = self._optimizer()
        return not asks_for_grad_scaler(type(optimizer).step) and skips_by_itself(optimizer, before_backward)

    def step_on_device(self, original: Callable, evaluate: Callable | None, args: tuple, kwargs: dict) -> Any:
        """The step of an optimizer that skips by itself. No host sync."""
        optimizer, flags = self._optimizer(), self.flags
        attributes = vars(optimizer)
        former = {name: attributes[name] for name in _OFFERED if name in attributes}
        try:
            # Also before a closure. An optimizer that does not evaluate it steps the gradients that are there.
            self.offer(former.get("found_inf"))
            given = (evaluate, *args) if evaluate or args else ()
            result = self.run(original, *given, writes_model=self.masters.lazy, **kwargs)
            checked, reference = self.gradients.checked, weakref.ref(self)

            def later(epoch: int) -> Culprits | None:
                binding = reference()
                return None if binding is None else binding._culprits_of(epoch, checked)

            outcome = self.steps.left_to_device(
                optimizer,
                flags.by_loss,
                self._known(attributes.get("model_grads")),
                getattr(optimizer, "found_inf", None),
                self._culprits,
                later,
                external="found_inf" in former,
                counts=attributes.get("skip_counts"),
            )
            self.gradients.drop_master_grads()
            self._restore_attributes(former)
            flags.clear()
            self.gradients.stepped = True
        except BaseException:
            flags.of_failed_step = True
            self._restore_attributes(former)  # again, after an interrupt: a flag that stays would skip all steps
            raise
        self.steps.conclude(optimizer, outcome)
        return result

    def offer(self, found_inf: Tensor | float | None) -> None:
        """Sets the attributes that the optimizer reads. Joins the flag with one that is there already."""
        optimizer = self._optimizer()
        if any(group.get("fused") for group in optimizer.param_groups):
            align_gradients(optimizer)
        flags = [flag for _, flag in self.flags.by_loss.values()]
        if found_inf is not None:  # 0-d, and 0 or 1, because torch's CPU kernels compare with 1
            flags.append(torch.as_tensor(found_inf).detach().reshape(()).ne(0).float())
        if flags:
            optimizer.found_inf = join_flags(flags, flags[0].device)
        vars(optimizer).pop("skip_counts", None)  # of a former evaluation of a closure
        if counts := self.steps.skip_counts(optimizer, self.flags.by_loss):
            optimizer.skip_counts = counts
        if self.masters.lazy:
            optimizer.model_params = self.masters.model_of
            optimizer.model_grads = self.gradients.lazy

    def _restore_attributes(self, former: dict[str, Any]) -> None:
        """Removes the attributes that ``offer`` has set, and puts ``former`` back."""
        attributes = vars(self.optimizer)
        for name in _OFFERED:
            attributes.pop(name, None)
        attributes.update(former)

    def take_flags(self) -> Flags:
        """Takes the flags of all losses since the last step, to decide about this step."""
        return self.flags.take()

    def skip(self, losses: Overflowed) -> None:
        culprits, known = self._culprits(), self._known(self.gradients.lazy)
        self.gradients.drop_master_grads()
        self.gradients.stepped = True
        self.flags.forget_taken()
        self.steps.skipped(self.optimizer, losses, known, culprits)

    def _culprits(self) -> Culprits:
        """The parameters with non-finite gradients now. Lazy gradients stay lazy."""
        lazy = self.gradients.lazy
        grads = {} if lazy is None else lazy.grads
        of_masters = ((p, grads[m] if m in grads else stored_grad(m)) for p, m in self.masters.pairs)
        found = itertools.chain(of_masters, ((p, p.grad) for p in self.masters.params_without_master))
        return culprits_among(((p, grad) for p, grad in found if grad is not None), self.names_by_id)

    def _culprits_of(self, epoch: int, checked: ModelGrads | None) -> Culprits | None:
        """The parameters with non-finite gradients of a step that the device skipped, as far as they are known."""
        if self.masters.pairs and checked is None:
            return None
        found: Culprits = ()
        if checked is not None and (masters := checked.not_finite()):
            names = self.names_by_id()
            found = tuple(
                Culprit(names.get(id(p), "a parameter of no group"), p.shape, None, None)
                for p, master in self.masters.pairs
                if id(master) in masters
            )
        if epoch == self.steps.epoch:
            others = ((p, p.grad) for p in self.masters.params_without_master if p.grad is not None)
            found += culprits_among(others, self.names_by_id)
        return found or None

    def let_through(self) -> None:
        """Records a step that the host decided on and that ran."""
        known = self._known(None)
        self.gradients.drop_master_grads()
        self.gradients.stepped = True
        self.flags.forget_taken()
        self.steps.stepped(self.optimizer, known)

    def model_params(self) -> list[Tensor]:
        """The parameters that the optimizer steps, in order, with model parameters in the places of their masters."""
        model_of = self.masters.model_of
        return [model_of.get(p, p) for group in self.optimizer.param_groups for p in group["params"]]

    def names(self) -> list[str]:
        """The names of the parameters that the optimizer steps, in order."""
        names = self.names_by_id()
        return [names[id(p)] for p in self.model_params()]

    def names_by_id(self) -> dict[int, str]:
        return self._names_of.of(self.optimizer, self.masters.model_of)

    def _known(self, lazy: ModelGrads | None) -> Known:
        """Scales, and the norm before clipping if a clip computed it. ``lazy``: the lazy gradients. No host sync."""
        without_master = self.masters.params_without_master
        if lazy is None:
            norm = norm_before_clipping(map(stored_grad, itertools.chain(self.masters.masters, without_master)))
        elif lazy.clipped_from is not None:
            norm = lazy.clipped_from
        else:
            norm = None if any(p.grad is not None for p in without_master) else lazy.norm()
        return Known(self.flags.take_scales(), norm)

    def factors_on(self, device: torch.device) -> tuple[Tensor | float, Tensor | float] | None:
        """The factors of the innermost block for its loss and for its gradients. None if gradients are not scaled."""
        if all(scale.is_identity for scale in self.loss_scales):
            return None
        scale, inv_scale = (f.on(device) if isinstance(f, PerDevice) else f for f in self.gradients.factors)
        return scale, inv_scale

    def refuse_grad_scaler(self) -> None:
        """Raises if there are masters: a scaler would neither unscale nor check their gradients."""
        self.loop.has_scaler = True
        if self.masters.pairs:
            raise AmpError(
                "a GradScaler was given an optimizer that is under amp with fp32 master weights. It would not unscale "
                "their gradients. Remove the scaler and use amp.scale_loss, which also skips steps; or use opt_level "
                "O0, O1 or O4. See docs/errors.md"
                "#a-gradscaler-was-given-an-optimizer-that-is-under-amp-with-fp32-master-weights."
            )

    # --- the other replaced methods -----------------------------------------------------------------------------------

    def _zero_grad(self, original: Callable, *args: Any, **kwargs: Any) -> None:
        self.steps.epoch += 1
        if self.phase is not RELEASED:
            self.masters.finish_writing()
            self.follow_groups()  # a parameter that was removed may belong to another optimizer now
        original(*args, **kwargs)
        self.gradients.drop_model_grads()
        self.loop.zeroed()
        # The flags of an interrupted block or step go with its gradients.
        if self.flags.has_failed or self.gradients.incomplete:
            self.flags.drop_failed()
        self.gradients.forget()

    def _add_param_group(self, original: Callable, param_group: dict[str, Any]) -> None:
        if self.phase is RELEASED:
            return original(param_group)
        self.follow_groups()
        original(param_group)
        try:
            self.masters.refuse_params_with_master(self.optimizer, self.optimizer.param_groups[-1])
            self.follow_groups()
        except BaseException:
            del self.optimizer.param_groups[-1]
            # Some parameters of the group may have been added.
            self.masters.look_again()
            raise

    def _state_dict(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        if self.phase is not RELEASED and self.masters.pairs and torch_state.is_calling():
            raise AmpError(
                "torch's get_optimizer_state_dict looks for the parameters of the optimizer in the model. This "
                f"{type(self.optimizer).__name__} steps amp's fp32 master weights instead. Use "
                "amp.get_state_dict(model, optimizer), which names them, and amp.set_state_dict. See "
                "docs/guide/checkpoints.md."
            )
        return original(*args, **kwargs)

    def _reduce_ex(self, original: Callable, protocol: Any) -> Any:
        return as_copied(original(protocol), self._formers, self.optimizer if self.masters.pairs else None)
