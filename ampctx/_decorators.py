"""Code beside the user's model: out of compiled graphs, without autograd, and reading a device without a wait."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.optim import optimizer as _torch_optimizer

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


# Private: whether a profiler may look for torch's labels, as torch asks before it makes them.
may_be_profiled: Callable[[], bool] = getattr(torch.autograd, "_profiler_enabled", lambda: True)


def profile_hook_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """torch's step hooks, and its label for profilers, which costs as much as a tenth of a small step: only where
    somebody sees them."""
    whole: Callable[..., Any] = torch.optim.Optimizer.profile_hook_step(step)
    beside_graphs = outside_of_graphs(whole)
    # Private: what register_optimizer_step_pre_hook and register_optimizer_step_post_hook fill. None in a torch without
    # them: then torch's own wrapper stays.
    before = getattr(_torch_optimizer, "_global_optimizer_pre_hooks", None)
    after = getattr(_torch_optimizer, "_global_optimizer_post_hooks", None)
    if before is None or after is None:
        return whole

    @functools.wraps(step)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        of_own = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
        if of_own or before or after or torch.compiler.is_compiling() or may_be_profiled():
            # A program that compiled ``optimizer.step`` before amp.initialize compiles what amp calls.
            return (beside_graphs if "given" in kwargs else whole)(self, *args, **kwargs)
        return step(self, *args, **kwargs)

    return wrapper
