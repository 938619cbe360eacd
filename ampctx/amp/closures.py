"""Steps that evaluate the model: ``optimizer.step(closure)``, and the two steps of SAM.

An optimizer may have moved by the time an evaluation of its closure overflows. amp then restores weights and optimizer
state, and the step counts as skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from ampctx.amp.phases import NOT_THE_USERS, SKIPPED, Step
from ampctx.casts.switch import CastSwitch
from ampctx.masters.gradients import BlockGradients
from ampctx.masters.lazy_grads import has_grad
from ampctx.masters.params import MasterParams
from ampctx.scaling.device_skips import Flags
from ampctx.scaling.guarded_step import FoundInfFlags, GuardedStep, Overflowed, overflowed
from ampctx.scaling.undo import snapshot


class SteppedBinding(Protocol):
    """What these functions use of the optimizer's binding, ``binding.OptimizerBinding``, which imports this module."""

    masters: MasterParams
    gradients: BlockGradients
    flags: FoundInfFlags
    steps: GuardedStep
    casts: CastSwitch
    phase: Step
    restore_unperturbed: Callable[[], None] | None

    @property
    def optimizer(self) -> Any: ...
    def refuse(self, event: str, name: str) -> None: ...
    def move_on(self, event: str) -> None: ...
    def call_own(self, original: Callable, *args: Any, **kwargs: Any) -> Any: ...
    def leave_stepping(self, before: Step) -> None: ...
    def check_misuse(self, has_closure: bool = False) -> None: ...
    def check_gradients(self, before_closure: bool = False) -> None: ...
    def is_left_to_device(self, before_backward: bool = False) -> bool: ...
    def step_on_device(self, original: Callable, evaluate: Callable | None, args: tuple, kwargs: dict) -> Any: ...
    def offer(self, found_inf: Tensor | float | None) -> None: ...
    def take_flags(self) -> Flags: ...
    def run(self, original: Callable, *args: Any, writes_model: bool = False, **kwargs: Any) -> Any: ...
    def skip(self, losses: Overflowed) -> None: ...
    def let_through(self) -> None: ...
    def undo_first_step(self) -> None: ...


class _OverflowInClosure(Exception):
    """Leaves ``optimizer.step(closure)`` from inside the closure, before the optimizer has seen the gradients."""


def step(binding: SteppedBinding, original: Callable, closure: Callable, args: tuple, kwargs: dict) -> Any:
    """``optimizer.step(closure)``. The device or the host decides about the skip."""
    if binding.is_left_to_device(before_backward=True):
        return _step_on_device(binding, original, closure, args, kwargs)
    return _step_on_host(binding, original, closure, args, kwargs)


def _step_on_device(binding: SteppedBinding, original: Callable, closure: Callable, args: tuple, kwargs: dict) -> Any:
    former = vars(binding.optimizer).get("found_inf")

    def evaluate() -> Any:
        # This optimizer has not moved yet. A block must not write weights after the forward that it belongs to.
        binding.masters.are_ahead = False
        with binding.casts.resumed():
            loss = closure()
        binding.check_gradients()
        if losses := binding.steps.overflowed_instead_of_device(binding.take_flags):
            binding.skip(losses)  # raises AmpStallError: one skip too many in a row
        binding.offer(former)
        binding.masters.begin_writing()
        return loss

    return binding.step_on_device(original, evaluate, args, kwargs)


def _step_on_host(binding: SteppedBinding, original: Callable, closure: Callable, args: tuple, kwargs: dict) -> Any:
    """For an optimizer that may evaluate the closure several times, and move in between."""
    binding.check_gradients(before_closure=True)  # the step uses gradients from before the closure, as SAM does
    if losses := overflowed(binding.take_flags()):
        return binding.skip(losses)
    found: Overflowed = []
    evaluated = False

    def evaluate() -> Any:
        nonlocal evaluated
        binding.masters.copy_to_model()
        if evaluated:
            # The optimizer has used these. A closure may zero gradients through the model, which does not reach them.
            binding.gradients.drop_master_grads()
        evaluated = True
        with binding.casts.resumed():
            loss = closure()
        binding.check_gradients()
        found.extend(overflowed(binding.take_flags()))
        if found:
            raise _OverflowInClosure
        binding.masters.begin_writing()
        return loss

    restore, before = snapshot(binding.optimizer), binding.phase
    binding.masters.begin_writing()
    try:
        result = binding.call_own(original, evaluate, *args, **kwargs)
        binding.masters.copy_to_model()
    except BaseException as error:
        binding.leave_stepping(before)
        restore()
        binding.masters.copy_to_model()
        if not isinstance(error, _OverflowInClosure):
            raise
        return binding.skip(found)
    binding.let_through()
    return result


def first_step(binding: SteppedBinding, original: Callable, *args: Any, **kwargs: Any) -> Any:
    """SAM's step to perturbed weights, called by the user. Also writes the model's weights. Skipped after an
    overflow."""
    if binding.phase in NOT_THE_USERS:
        return original(*args, **kwargs)
    if losses := _begin(binding, "first_step"):
        binding.skip(losses)
        binding.move_on("first_step skipped")
        _zero_if_asked(binding, args, kwargs)
        return None
    binding.restore_unperturbed = snapshot(binding.optimizer, wrapped_too=False)
    try:
        result = binding.run(original, *args, **kwargs)
        binding.gradients.drop_master_grads()
    except BaseException:
        binding.undo_first_step()
        binding.move_on("first_step raised")
        raise
    binding.move_on("first_step")
    return result


def second_step(binding: SteppedBinding, original: Callable, *args: Any, **kwargs: Any) -> Any:
    """SAM's second step: restores the unperturbed weights and steps them. After an overflow in either backward, or
    without gradients, the weights stay the unperturbed ones."""
    if binding.phase in NOT_THE_USERS:
        return original(*args, **kwargs)
    was_skipped = binding.phase is SKIPPED
    losses = _begin(binding, "second_step")
    binding.move_on("second_step")
    if was_skipped:
        binding.gradients.drop_master_grads()  # first_step has counted the skip
    elif losses:
        binding.undo_first_step()
        binding.skip(losses)
    else:
        params = (p for group in binding.optimizer.param_groups for p in group["params"])
        if any(map(has_grad, params)):
            binding.restore_unperturbed = None
        result = binding.run(original, *args, **kwargs)
        binding.undo_first_step()  # usual SAMs restore only weights that have a gradient
        binding.let_through()
        return result
    _zero_if_asked(binding, args, kwargs)
    return None


def _begin(binding: SteppedBinding, name: str) -> Overflowed:
    binding.refuse(name, f"optimizer.{name}()")
    binding.check_misuse()
    binding.steps.epoch += 1
    binding.flags.forget_taken()
    try:
        binding.check_gradients()
        flags = binding.take_flags()
        return [] if binding.phase is SKIPPED else overflowed(flags)
    except BaseException:
        binding.flags.give_back()
        raise


def _zero_if_asked(binding: SteppedBinding, args: tuple, kwargs: dict) -> None:
    """Handles SAM's ``first_step(zero_grad=True)``."""
    if args[0] if args else kwargs.get("zero_grad", False):
        binding.optimizer.zero_grad()
