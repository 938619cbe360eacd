"""What torch.compile is to leave out of its graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable)


def outside_of_graphs(fn: F) -> F:
    """Decorator: in code that torch.compile sees, a call of ``fn`` ends the graph and runs as it is.

    With ``fullgraph=True`` it is torch's error, which says so.
    """

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            from ampctx._graph_break import call

            return call(fn, args, kwargs)
        return fn(*args, **kwargs)

    # Code of its own: dynamo gives up on code that it has compiled for many different functions.
    wrapper.__code__ = wrapper.__code__.replace(co_name=getattr(fn, "__name__", "wrapper"))
    return cast(F, functools.wraps(fn)(wrapper))
