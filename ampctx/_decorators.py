"""Code beside the user's model: out of compiled graphs, without autograd, and reading a device without a wait."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ampctx._errors import unexpected

F = TypeVar("F", bound=Callable)
# Private: what torch.set_grad_enabled calls, which makes an object besides. dynamo knows both.
_set_grad_enabled = torch._C._set_grad_enabled


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
    """Decorates ``fn``: ``torch.no_grad()`` for one thread's call, in a third of the time. An interrupt at any place
    restores the former mode, too."""

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return fn(*args, **kwargs)
        try:
            _set_grad_enabled(False)
            return fn(*args, **kwargs)
        finally:
            _set_grad_enabled(True)

    return cast(F, wrapper)


def names_arguments(fn: F) -> F:
    """Decorates ``fn``: AmpTypeError for an unknown keyword names the nearest arguments."""
    known = inspect.signature(fn).parameters

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs.keys() - known.keys():
            raise unexpected(fn.__qualname__, name, known)
        return fn(*args, **kwargs)

    return cast(F, wrapper)


def host_may_read() -> bool:
    """Whether the host may read the device. Not while a CUDA graph is captured."""
    return not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def arriving(t: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """A copy of ``t`` on its way to the host, and the event of its arrival. None: it is there."""
    if not t.is_cuda:
        return t.cpu(), None
    here = torch.empty(t.shape, dtype=t.dtype, device="cpu", pin_memory=True)
    here.copy_(t, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(t.device))
    return here, event
