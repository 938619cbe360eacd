"""Functions that cast their arguments: decorated ones, and functions replaced on their module or class."""

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
    """Wraps ``fn``: ``call(fn, args, kwargs, active())``, or ``fn`` itself while ``active()`` is None."""

    # Copy the __dict__ of plain functions only; that of a callable object is its state.
    @functools.wraps(fn, updated=("__dict__",) if isinstance(fn, types.FunctionType) else ())
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        now = active()
        return fn(*args, **kwargs) if now is None else call(fn, args, kwargs, now)

    return wrapper


def call_cast(rule: Rule, fn: Callable, args: tuple, kwargs: dict[str, Any], low: torch.dtype = torch.float16) -> Any:
    """Calls ``fn`` with arguments cast by ``rule``; with autocast off for "float"."""
    args, kwargs = map_arguments(args, kwargs, leaf_cast(rule, args, kwargs, low))
    if rule != "float":
        return fn(*args, **kwargs)
    with autocast_off():
        return fn(*args, **kwargs)


_MISSING = object()


def replace_function(owner: Any, name: str, cast: Callable[[Any], Any]) -> Undo:
    """Replaces ``owner.name`` by ``cast(function)``. The undo restores the original."""
    # On a class, take the attribute itself and not the bound method.
    static = inspect.getattr_static(owner, name, None) if isinstance(owner, type) else None
    replacement = cast(static if isinstance(static, (staticmethod, classmethod)) else getattr(owner, name))
    former = vars(owner).get(name, _MISSING) if hasattr(owner, "__dict__") else getattr(owner, name)
    setattr(owner, name, replacement)

    def undo() -> None:
        # Other code may have wrapped the replacement. Then it stays, and calls the original.
        if inspect.getattr_static(owner, name, None) is not replacement:
            return
        if former is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, former)

    return undo


class Shared:
    """Reference-counted installations: installed for the first user, undone after the last."""

    def __init__(self) -> None:
        # Reentrant: collecting a session may release in the same thread while another one installs.
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


# Global, like torch's functions and its dispatcher.
shared = Shared()

# --- functions that the user names ------------------------------------------------------------------------------------


class FunctionCasts:
    """Casts of the user's own functions under O1 and O4, by decorator or by name. One per session.

    While ``active()`` gives a 16-bit dtype, a call casts the floating tensors among its arguments, in lists, tuples and
    dicts too:

    - "half": to that dtype. Autocast stays on inside, so a method's module casts its fp32 weights too.
    - "float": fp16 and bf16 to fp32; fp64 stays. Autocast is off inside.
    - "promote": to the widest dtype among them.

    Otherwise a call passes through. Gradients flow through the casts.
    """

    def __init__(self, active: Callable[[], torch.dtype | None]) -> None:
        self._active = active
        self._queue: list[tuple[Rule, Any, str]] = []
        self._installed = Shared()

    def _decorate(self, kind: Rule, fn: Any) -> Any:
        """Wraps ``fn`` with casts: a function, builtin, method, ``Function.apply`` or torch.ops packet.

        Raises:
            AmpTypeError: ``fn`` is not callable.
        """
        if isinstance(fn, (staticmethod, classmethod)):
            return type(fn)(self._decorate(kind, fn.__func__))
        if not callable(fn):
            raise AmpTypeError(f"{kind}_function: fn must be callable, got {type(fn).__name__}")
        return cast_function(fn, self._active, functools.partial(call_cast, kind))

    def _register(self, kind: Rule, module: Any, name: str) -> None:
        """Queues ``module.name`` for every later ``cast_registered``. ``module`` is a module, class or object.

        Raises:
            AmpValueError: ``module`` has no such function.
        """
        if not callable(getattr(module, name, None)):
            raise AmpValueError(f"No function named {name} in module {module}.")
        if not any((k, n) == (kind, name) and m is module for k, m, n in self._queue):
            self._queue.append((kind, module, name))

    def cast_registered(self) -> Undo:
        """Replaces the queued functions that are not replaced yet, in order. The undo restores the originals."""
        with ExitStack() as stack:
            for kind, module, name in self._queue:
                replace = functools.partial(replace_function, module, name, functools.partial(self._decorate, kind))
                stack.callback(self._installed.acquire((kind, id(module), name), replace))
            return stack.pop_all().close

    def half_function(self, fn: Callable) -> Callable:
        """Decorates ``fn``: at O1 and O4 its floating arguments become the level's 16-bit type."""
        return self._decorate("half", fn)

    bfloat16_function = half_function  # the level decides between fp16 (O1) and bf16 (O4)

    def float_function(self, fn: Callable) -> Callable:
        """Decorates ``fn``: at O1 and O4 its 16-bit arguments become fp32, and autocast is off inside."""
        return self._decorate("float", fn)

    def promote_function(self, fn: Callable) -> Callable:
        """Decorates ``fn``: at O1 and O4 its floating arguments become the widest type among them."""
        return self._decorate("promote", fn)

    def register_half_function(self, module: Any, name: str) -> None:
        """Makes ``module.name`` a ``half_function`` from the next O1 or O4 ``initialize`` until ``reset``."""
        self._register("half", module, name)

    register_bfloat16_function = register_half_function

    def register_float_function(self, module: Any, name: str) -> None:
        """Makes ``module.name`` a ``float_function`` from the next O1 or O4 ``initialize`` until ``reset``."""
        self._register("float", module, name)

    def register_promote_function(self, module: Any, name: str) -> None:
        """Makes ``module.name`` a ``promote_function`` from the next O1 or O4 ``initialize`` until ``reset``."""
        self._register("promote", module, name)
