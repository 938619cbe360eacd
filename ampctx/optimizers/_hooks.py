"""torch's hooks and labels around the ``step`` of each class."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import optimizer as _torch_optimizer

from ampctx._decorators import outside_of_graphs

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
