"""Restores an optimizer to its state before a step that overflowed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def with_wrapped(optimizer: Any) -> list[Any]:
    """The optimizer, and the optimizers among its attributes, such as the one that LARC or SAM wraps."""
    found = [optimizer]
    for one in found:
        for value in vars(one).values():
            if isinstance(value, torch.optim.Optimizer) and not any(value is other for other in found):
                found.append(value)
    return found


def snapshot(optimizer: Any, wrapped_too: bool = True) -> Callable[[], None]:
    """Copies parameters, state and group options. Returns the function that restores them. No host sync.

    Args:
        optimizer: any optimizer. The snapshot has the parameters of its groups.
        wrapped_too: whether to include the state of an optimizer that it wraps.
    """
    values = [(p, p.detach(), p.detach().clone()) for group in optimizer.param_groups for p in group["params"]]
    states = {id(one.state): one.state for one in (with_wrapped(optimizer) if wrapped_too else [optimizer])}.values()
    saved_states = [(state, {p: copy.deepcopy(dict(of_p)) for p, of_p in state.items()}) for state in states]
    options = [(g, {k: copy.deepcopy(v) for k, v in g.items() if k != "params"}) for g in optimizer.param_groups]

    @torch.no_grad()
    def restore() -> None:
        for p, memory, value in values:
            if p.data_ptr() != memory.data_ptr():
                p.data = memory  # SAM assigns p.data
            p.copy_(value)
        for state, saved in saved_states:
            state.clear()
            state.update(saved)
        for group, of_group in options:  # a group that was added since stays as it is
            for k, v in of_group.items():
                if isinstance(v, Tensor):
                    group[k].copy_(v)  # other code may refer to a tensor lr
                else:
                    group[k] = v

    return restore
