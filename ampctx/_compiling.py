"""Decorators of functions that run beside the user's model: out of compiled graphs, and without autograd."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable)


def outside_of_graphs(fn: F) -> F:
    """Decorates ``fn``: in compiled code a call breaks the graph and runs uncompiled. ``fullgraph=True`` makes that
    torch's error."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            from ampctx._graph_break import call

            return call(fn, args, kwargs)
        return fn(*args, **kwargs)

    # Its own code object: dynamo gives up on a code object that it has compiled for many functions.
    wrapper.__code__ = wrapper.__code__.replace(co_name=getattr(fn, "__name__", "wrapper"))
    return cast(F, functools.wraps(fn)(wrapper))


def without_grad(fn: F) -> F:
    """Decorates ``fn``: ``torch.no_grad()`` for one thread's call, in half the time. An interrupt at any place restores
    the former mode, too."""

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        former = torch.is_grad_enabled()
        try:
            torch.set_grad_enabled(False)
            return fn(*args, **kwargs)
        finally:
            torch.set_grad_enabled(former)

    return cast(F, wrapper)
