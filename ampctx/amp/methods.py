"""Methods of an optimizer in the place of its own: the only code that puts them there.

A replacement holds the optimizer weakly and offers ``__func__``: LR schedulers wrap ``optimizer.step.__func__``, before
or after.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ampctx._compiling import outside_of_graphs
from ampctx._errors import AmpError


def replace(optimizer: Any, name: str, method: Callable) -> Callable[[], None]:
    """Puts ``method(original, *args)`` in place of ``optimizer.name``; returns what takes it back.

    Nothing here refers to the optimizer strongly, or it would hold itself through its own method.
    """
    former = vars(optimizer).get(name)
    of_class: Any = getattr(type(optimizer), name, None)
    # A wrapper may leave the method to the optimizer inside.
    bound = former if former is not None or of_class is not None else getattr(optimizer, name)
    template: Any = of_class if bound is None else bound
    optimizer_ref = weakref.ref(optimizer)
    in_graph = outside_of_graphs(method)

    def original(*args: Any, **kwargs: Any) -> Any:
        return bound(*args, **kwargs) if bound is not None else of_class(optimizer_ref(), *args, **kwargs)

    @functools.wraps(template)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return (in_graph if torch.compiler.is_compiling() else method)(original, *args, **kwargs)

    def as_function(_self: Any, *args: Any, **kwargs: Any) -> Any:
        # Not through replacement, which would hold itself.
        return (in_graph if torch.compiler.is_compiling() else method)(original, *args, **kwargs)

    replacement.__func__ = as_function  # type: ignore[attr-defined]
    setattr(optimizer, name, replacement)
    replacement_ref = weakref.ref(replacement)

    def undo() -> None:
        target = optimizer_ref()
        # Somebody (an LR scheduler) may have wrapped the replacement; it then stays and passes through.
        if target is not None and name in vars(target) and vars(target)[name] is replacement_ref():
            if former is None:
                delattr(target, name)
            else:
                setattr(target, name, former)

    return undo


class StepOfCopy:
    """The ``step`` of a copy of an optimizer that is under amp with master weights."""

    def __init__(self, optimizer: str) -> None:
        self.optimizer = optimizer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise AmpError(
            f"this {self.optimizer} is a copy of one under amp: it holds copies of the fp32 master weights, which no "
            "model follows. Its state_dict() can be loaded; to train a copy of the model, give it an optimizer and an "
            "AmpSession of its own"
        )

    @property
    def __func__(self) -> Callable:
        return lambda _, *args, **kwargs: self(*args, **kwargs)  # LR schedulers wrap it


def as_copied(reduced: tuple, formers: dict[str, Any], of_masters: Any) -> tuple:
    """What a copy or pickle of an optimizer is made of, without the replaced methods, which are about the original.

    ``of_masters``: the optimizer, where it has masters. The copy would step copies of them, which no model follows: it
    is for its ``state_dict()``, and its ``step`` says so.
    """
    function, arguments, state, *rest = reduced
    if isinstance(state, dict):
        own = {name: former for name, former in formers.items() if name in state and former is not None}
        state = {key: value for key, value in state.items() if key not in formers} | own
        if of_masters is not None:
            state["step"] = StepOfCopy(type(of_masters).__name__)
    return function, arguments, state, *rest


def is_bound(optimizer: Any) -> bool:
    """Whether some session has the optimizer."""
    return "__reduce_ex__" in vars(optimizer)


def weak_method(method: Any) -> Callable[..., Any]:
    """``method``, for as long as its object lives; then None."""
    # No WeakMethod, which dynamo cannot call.
    reference, function = weakref.ref(method.__self__), method.__func__

    def call(*args: Any) -> Any:
        return None if (owner := reference()) is None else function(owner, *args)

    return call
