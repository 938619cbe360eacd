"""Replaces methods of an optimizer on the instance, and tells who calls them.

A replacement refers to the optimizer weakly. It has ``__func__``, because LR schedulers wrap
``optimizer.step.__func__``, before amp or after it.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from itertools import islice
from types import FrameType
from typing import Any

import torch

from ampctx._decorators import outside_of_graphs
from ampctx._errors import AmpError


def replace(optimizer: Any, name: str, method: Callable) -> Callable[[], None]:
    """Puts ``method(original, *args)`` in place of ``optimizer.name``; returns the undo. Nothing here refers to the
    optimizer strongly: its own method would keep it alive."""
    former = vars(optimizer).get(name)
    of_class: Any = getattr(type(optimizer), name, None)
    # The class of a wrapper may lack the method: __getattr__ gives that of the optimizer inside.
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
        # Not through ``replacement``, which would refer to itself.
        return (in_graph if torch.compiler.is_compiling() else method)(original, *args, **kwargs)

    replacement.__func__ = as_function  # type: ignore[attr-defined]
    setattr(optimizer, name, replacement)
    replacement_ref = weakref.ref(replacement)

    def undo() -> None:
        target = optimizer_ref()
        # If an LR scheduler has wrapped the replacement, it stays and passes through.
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
            f"{self.optimizer}.step(): this {self.optimizer} is a copy of one under amp. It steps copies of the fp32 "
            "master weights, and no model follows them. Use the copy for its state_dict() only. To train a copy of the "
            "model, give it its own optimizer and AmpSession."
        )

    __func__ = property(lambda self: lambda _, *args, **kwargs: self())  # LR schedulers wrap it


def as_copied(reduced: tuple, formers: dict[str, Any], of_masters: Any) -> tuple:
    """The ``__reduce_ex__`` value of an optimizer without the replaced methods. ``of_masters``: the optimizer if it has
    masters, else None. The ``step`` of its copy raises."""
    function, arguments, state, *rest = reduced
    if isinstance(state, dict):
        kept = {name: former for name, former in formers.items() if name in state and former is not None}
        state = {key: value for key, value in state.items() if key not in formers} | kept
        if of_masters is not None:
            state["step"] = StepOfCopy(type(of_masters).__name__)
    return function, arguments, state, *rest


def weak_method(method: Any) -> Callable[..., Any]:
    """Calls ``method`` while its object is alive; returns None afterwards."""
    # dynamo cannot call a WeakMethod.
    reference, function = weakref.ref(method.__self__), method.__func__

    def call(*args: Any) -> Any:
        return None if (owner := reference()) is None else function(owner, *args)

    return call


def finalizer(owner: Any, action: Callable[[], None]) -> Callable[[], None]:
    """Runs ``action`` once: when called, or when ``owner`` is gone, in the thread that drops the last reference."""
    once = weakref.finalize(owner, action)
    once.atexit = False
    return once


# --- callers, of which no hook tells ----------------------------------------------------------------------------------

# Its functions name parameters by the model, which lacks amp's masters. Where an optimizer has no state yet, they make
# one by a step of zeros with lr=0, which is not a step of the run.
CHECKPOINT = "torch.distributed.checkpoint.state_dict"
CHECKPOINT_SAVER = "torch.distributed.checkpoint.state_dict_saver"
# torch's function, its context managers, the wrappers of the replaced method, those of LR schedulers and our own.
_DEPTH = 18


def called_by(module: str = CHECKPOINT) -> bool:
    """Whether a function of that module called the method that asks."""
    return module in sys.modules and any(f.f_globals.get("__name__") == module for f in islice(_callers(), _DEPTH))


def called_by_grad_scaler() -> bool:
    """Whether an enabled scaler of torch is among the callers. It marks only fused optimizers, by attributes; of others
    its frame is the one sign. A test guards the names in that frame."""
    found = (f.f_locals.get("self") for f in _callers() if f.f_globals.get("__name__") == "torch.amp.grad_scaler")
    return any(isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled() for scaler in found)


def _callers() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
