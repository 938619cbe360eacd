"""Functions that the user names for a cast: ``amp.half_function``, ``amp.register_half_function`` and their like."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any, Literal

import torch

from ampctx._errors import AmpTypeError, AmpValueError
from ampctx.casts.arguments import LOW_PRECISION, Undo, autocast_off, map_floating_args, replace_attribute, to_widest

Kind = Literal["half", "float", "promote"]

# One per kind of user function: arguments and the session's 16-bit type to cast arguments.
_CASTS: dict[str, Callable[[Any, torch.dtype], Any]] = {
    "half": lambda args, low: map_floating_args(args, lambda t: t.to(low)),
    "float": lambda args, low: map_floating_args(args, lambda t: t.float() if t.dtype in LOW_PRECISION else t),
    "promote": lambda args, low: to_widest(args),
}


class FunctionCasts:
    """The user's own functions under O1 and O4, by decorator or by name. One per session.

    While ``active()`` gives a 16-bit type, the floating tensors among a function's arguments (also in lists, tuples and
    dicts) are cast:

    - "half": to that type. Autocast stays on inside, so that fp32 weights of a method's module follow.
    - "float": 16-bit ones to fp32; fp64 stays. Autocast is off inside.
    - "promote": to the widest type among them.

    Otherwise the function is called as if it were not wrapped. Gradients flow through the casts.
    """

    def __init__(self, active: Callable[[], torch.dtype | None]) -> None:
        self._active = active
        self._queue: list[tuple[Kind, Any, str]] = []
        self._installed: list[tuple[Kind, Any, str]] = []

    def decorate(self, kind: Kind, fn: Any) -> Any:
        """``fn`` with casts: a function, builtin, method of any kind, ``Function.apply`` or torch.ops packet.

        Raises:
            AmpTypeError: ``fn`` cannot be called.
        """
        if isinstance(fn, (staticmethod, classmethod)):
            return type(fn)(self.decorate(kind, fn.__func__))
        if not callable(fn):
            raise AmpTypeError(f"{kind}_function: fn must be callable, got {type(fn).__name__}")
        active, cast = self._active, _CASTS[kind]

        # Only a plain function's __dict__ is copied: that of a callable object is its state.
        @functools.wraps(fn, updated=("__dict__",) if isinstance(fn, types.FunctionType) else ())
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            low = active()
            if low is None:
                return fn(*args, **kwargs)
            args, kwargs = cast((args, kwargs), low)
            with autocast_off() if kind == "float" else nullcontext():
                return fn(*args, **kwargs)

        return wrapper

    def register(self, kind: Kind, module: Any, name: str) -> None:
        """Queues ``module.name`` for ``install``, now and at every later one. ``module`` is a module, class or object.

        Raises:
            AmpValueError: there is no such function.
        """
        if not callable(getattr(module, name, None)):
            raise AmpValueError(f"No function named {name} in module {module}.")
        if not any((k, n) == (kind, name) and m is module for k, m, n in self._queue):
            self._queue.append((kind, module, name))

    def install(self) -> Undo:
        """Replaces what is queued and not in place yet, in that order. The undo puts the originals back."""
        with ExitStack() as stack:
            for entry in self._queue:
                if any(entry is other for other in self._installed):
                    continue
                kind, module, name = entry
                # On a class, the attribute itself rather than what it binds to.
                static = inspect.getattr_static(module, name, None) if isinstance(module, type) else None
                fn = static if isinstance(static, (staticmethod, classmethod)) else getattr(module, name)
                stack.callback(replace_attribute(module, name, self.decorate(kind, fn)))
                self._installed.append(entry)
                stack.callback(self._installed.remove, entry)
            return stack.pop_all().close
