"""What torch wraps around the ``step`` of an optimizer class: step hooks, and a label for profilers.

The label alone costs as much as a tenth of a small step. Without hooks and without a profiler there is nothing to do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

# Private: what register_optimizer_step_pre_hook and register_optimizer_step_post_hook fill.
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

# Private: torch asks it in the same way before it makes labels.
_is_profiled: Callable[[], bool] = torch.autograd._profiler_enabled


def profile_hook_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.optim.Optimizer.profile_hook_step``, which does its work only where somebody sees it."""
    whole = torch.optim.Optimizer.profile_hook_step(step)
    before, after = _global_optimizer_pre_hooks, _global_optimizer_post_hooks

    @functools.wraps(step)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        of_own = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
        if of_own or before or after or torch.compiler.is_compiling() or _is_profiled():
            return whole(self, *args, **kwargs)
        return step(self, *args, **kwargs)

    return wrapper
