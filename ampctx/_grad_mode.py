"""Code that runs without gradients, whoever calls it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable)


def without_grad(fn: F) -> F:
    """``torch.no_grad()`` as a decorator, for functions that call each other many times in an iteration: it costs next
    to nothing where gradients are off already."""
    inside = torch.no_grad()(fn)

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return inside(*args, **kwargs) if torch.is_grad_enabled() else fn(*args, **kwargs)

    return cast(F, wrapper)
