"""Functions that cast their arguments: the user's own, and functions of others that are replaced on their owners."""

from __future__ import annotations

import functools
import inspect
import threading
import types
from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import ExitStack
from typing import Any

import torch

from ampctx._errors import AmpTypeError, AmpValueError
from ampctx.casts.arguments import Rule, Undo, autocast_off, leaf_cast, map_arguments

# --- one function -----------------------------------------------------------------------------------------------------


def cast_function(fn: Callable, active: Callable[[], Any], call: Callable[[Callable, tuple, dict, Any], Any]) -> Any:
    """``fn`` under its own name, called through ``call(fn, args, kwargs, now)`` unless ``now = active()`` is None."""

    # Only a plain function's __dict__ is copied: that of a callable object is its state.
    @functools.wraps(fn, updated=("__dict__",) if isinstance(fn, types.FunctionType) else ())
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        now = active()
        return fn(*args, **kwargs) if now is None else call(fn, args, kwargs, now)

    return wrapper


def call_cast(rule: Rule, fn: Callable, args: tuple, kwargs: dict[str, Any], low: torch.dtype = torch.float16) -> Any:
    """``fn`` of arguments cast by ``rule``. What is to compute in fp32 finds autocast off."""
    args, kwargs = map_arguments(args, kwargs, leaf_cast(rule, args, kwargs, low))
    if rule != "float":
        return fn(*args, **kwargs)
    with autocast_off():
        return fn(*args, **kwargs)


_MISSING = object()


def replace_function(owner: Any, name: str, cast: Callable[[Any], Any]) -> Undo:
    """Puts ``cast(function)`` in the place of a function. The undo puts back what was there."""
    # On a class, the attribute itself rather than what it binds to.
    static = inspect.getattr_static(owner, name, None) if isinstance(owner, type) else None
    replacement = cast(static if isinstance(static, (staticmethod, classmethod)) else getattr(owner, name))
    former = vars(owner).get(name, _MISSING) if hasattr(owner, "__dict__") else getattr(owner, name)
    setattr(owner, name, replacement)

    def undo() -> None:
        # Somebody may have wrapped the replacement since; it then stays where it is and passes through.
        if inspect.getattr_static(owner, name, None) is not replacement:
            return
        if former is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, former)

    return undo


class Shared:
    """What is installed once for all who want it, and taken away with the last of them."""

    def __init__(self) -> None:
        # Reentrant: a session that is collected while another one installs lets go in the same thread.
        self._lock = threading.RLock()
        self._users: Counter[Hashable] = Counter()
        self._undo: dict[Hashable, Undo] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._undo

    def acquire(self, key: Hashable, install: Callable[[], Undo]) -> Undo:
        with self._lock, ExitStack() as stack:
            self._users[key] += 1
            stack.callback(self._release, key)
            if key not in self._undo:
                self._undo[key] = install()
            return stack.pop_all().close

    def _release(self, key: Hashable) -> None:
        with self._lock:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                if key in self._undo:
                    self._undo.pop(key)()


# Global, as torch's functions and its dispatcher are.
shared = Shared()

# --- functions that the user names ------------------------------------------------------------------------------------


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
        self._queue: list[tuple[Rule, Any, str]] = []
        self._installed = Shared()

    def decorate(self, kind: Rule, fn: Any) -> Any:
        """``fn`` with casts: a function, builtin, method of any kind, ``Function.apply`` or torch.ops packet.

        Raises:
            AmpTypeError: ``fn`` cannot be called.
        """
        if isinstance(fn, (staticmethod, classmethod)):
            return type(fn)(self.decorate(kind, fn.__func__))
        if not callable(fn):
            raise AmpTypeError(f"{kind}_function: fn must be callable, got {type(fn).__name__}")
        return cast_function(fn, self._active, functools.partial(call_cast, kind))

    def register(self, kind: Rule, module: Any, name: str) -> None:
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
            for kind, module, name in self._queue:
                replace = functools.partial(replace_function, module, name, functools.partial(self.decorate, kind))
                stack.callback(self._installed.acquire((kind, id(module), name), replace))
            return stack.pop_all().close
