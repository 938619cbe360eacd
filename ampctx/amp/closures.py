"""Steps that evaluate the model: ``optimizer.step(closure)``, and the two steps of SAM.

An optimizer may have moved by the time an evaluation of its closure overflows. amp then restores weights and optimizer
state, and the step counts as skipped. ``binding`` is an ``OptimizerBinding``, whose module imports this one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ampctx._errors import AmpError
from ampctx.scaling.any_optimizer import with_wrapped
from ampctx.scaling.step_record import Overflowed, overflowed
from ampctx.weights.pending import has_grad


class _OverflowInClosure(Exception):
    """Leaves ``optimizer.step(closure)`` from inside the closure, before the optimizer has seen the gradients."""


def step(binding: Any, original: Callable, closure: Callable, args: tuple, kwargs: dict) -> Any:
    by_device = binding.device_decides(before_backward=True)
    return (_step_on_device if by_device else _step_on_host)(binding, original, closure, args, kwargs)


def _step_on_device(binding: Any, original: Callable, closure: Callable, args: tuple, kwargs: dict) -> Any:
    former = vars(binding.optimizer).get("found_inf")
    binding.masters.resync()  # what the program has written is there, also after a closure that raises

    def evaluate() -> Any:
        # This optimizer has not moved yet. A block must not write weights after the forward that it belongs to.
        binding.masters.ahead = 0
        with binding.casts.resumed():
            loss = closure()
        binding.ready()
        if losses := binding.steps.overflowed_at_limit(binding.flags.by_loss):
            binding.decided(losses)  # raises AmpStallError: one skip too many in a row
        binding.offer(former)
        binding.masters.begin()
        return loss

    return binding.step_on_device(original, evaluate, args, kwargs)


def _step_on_host(binding: Any, original: Callable, closure: Callable, args: tuple, kwargs: dict) -> Any:
    """For an optimizer that may evaluate the closure several times, and move in between."""
    binding.ready(before_closure=True)  # the step uses gradients from before the closure, as SAM does
    if losses := overflowed(binding.flags.take()):
        return binding.decided(losses)
    found: Overflowed = []
    evaluated = False

    def evaluate() -> Any:
        nonlocal evaluated
        binding.masters.copy_to_model()
        if evaluated:
            # The optimizer has used these. A closure may zero gradients through the model, which does not reach them.
            binding.masters.drop_grads()
        evaluated = True
        with binding.casts.resumed():
            loss = closure()
        binding.ready()
        found.extend(overflowed(binding.flags.take()))
        if found:
            raise _OverflowInClosure
        binding.masters.begin()
        return loss

    restore = _snapshot(binding.optimizer)
    try:
        result = binding.run(original, evaluate, *args, **kwargs)
    except BaseException as error:
        restore()
        binding.masters.copy_to_model()
        if not isinstance(error, _OverflowInClosure):
            raise
        return binding.decided(found)
    binding.decided()
    return result


def first_step(binding: Any, original: Callable, *args: Any, **kwargs: Any) -> Any:
    """SAM's step to perturbed weights, also of the model. Skipped after an overflow."""
    if binding.inside or binding.released:
        return original(*args, **kwargs)
    binding.refuse("optimizer.first_step()")
    if binding.restore_unperturbed is not None:
        raise AmpError(
            "optimizer.first_step() was called a second time. The weights are perturbed already, and the originals "
            "would be lost. Call optimizer.second_step() first; after optimizer.zero_grad() it only restores them."
        )
    try:
        losses = _ready(binding)
        binding.first_step_skipped = bool(losses)
        if losses:
            binding.decided(losses)
            _zero_if_asked(binding, args, kwargs)
            return None
        binding.restore_unperturbed = _snapshot(binding.optimizer, wrapped_too=False)
        result = binding.run(original, *args, **kwargs)
        binding.masters.drop_grads()
    except BaseException:
        binding.undo_first_step()
        binding.flags.give_back()
        raise
    return result


def second_step(binding: Any, original: Callable, *args: Any, **kwargs: Any) -> Any:
    """SAM's second step, of the unperturbed weights. After an overflow in either backward it only restores these."""
    if binding.inside or binding.released:
        return original(*args, **kwargs)
    binding.refuse("optimizer.second_step()")
    try:
        skipped, binding.first_step_skipped = binding.first_step_skipped, False
        losses = _ready(binding, decide=not skipped)
        if skipped:
            binding.masters.drop_grads()  # first_step has counted the skip
        elif losses:
            binding.undo_first_step()
            binding.decided(losses)
        else:
            if any(map(has_grad, binding.params())):
                binding.restore_unperturbed = None
            result = binding.run(original, *args, **kwargs)
            binding.undo_first_step()  # usual SAMs restore only weights that have a gradient
            binding.decided()
            return result
    except BaseException:
        binding.flags.give_back()
        raise
    _zero_if_asked(binding, args, kwargs)
    return None


def _ready(binding: Any, decide: bool = True) -> Overflowed:
    binding.check_misuse()
    binding.steps.epoch += 1
    binding.flags.taken = None
    binding.ready()
    flags = binding.flags.take()
    return overflowed(flags) if decide else []


def _zero_if_asked(binding: Any, args: tuple, kwargs: dict) -> None:
    if args[0] if args else kwargs.get("zero_grad", False):
        binding.optimizer.zero_grad()


def _snapshot(optimizer: Any, wrapped_too: bool = True) -> Callable[[], None]:
    """Copies parameters, state and group options. Returns the function that restores them. No host sync.
    ``wrapped_too``: whether to include the state of an optimizer that it wraps."""
    values = [(p, p.detach(), p.detach().clone()) for group in optimizer.param_groups for p in group["params"]]
    states = {id(one.state): one.state for one in (with_wrapped(optimizer) if wrapped_too else [optimizer])}.values()
    # Some have numbers beside the dicts of parameters.
    saved_states = [
        (state, {k: copy.deepcopy(dict(v) if isinstance(v, Mapping) else v) for k, v in state.items()})
        for state in states
    ]
    options = [(g, {k: copy.deepcopy(v) for k, v in g.items() if k != "params"}) for g in optimizer.param_groups]

    @torch.no_grad()
    def restore() -> None:
        for p, memory, value in values:
            if p.data_ptr() != memory.data_ptr():
                p.data = memory  # SAM assigns p.data
            p.copy_(value)
        for state, saved in saved_states:
            state.clear()
            state.update(saved)
        for group, of_group in options:  # a group that was added since stays as it is
            for k, v in of_group.items():  # other code may refer to a tensor lr
                group[k] = group[k].copy_(v) if isinstance(v, Tensor) else v

    return restore
