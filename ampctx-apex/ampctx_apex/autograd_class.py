"""The base of the classes that apex derives from ``torch.autograd.Function``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class AutogradClass:
    """``apply`` is differentiable torch code: it works under torch.compile and torch.func, and has a second backward.

    ``forward`` and ``backward`` have apex's arguments. Programs read the signature of ``forward``, or call both with a
    context of their own.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if AutogradClass in cls.__bases__:
            return
        # A program's class, with a forward or backward of its own.
        methods = {name: staticmethod(getattr(cls, name)) for name in ("forward", "backward")}
        function = type(cls.__name__, (torch.autograd.Function,), {**methods, "__module__": cls.__module__})
        cls.apply = staticmethod(function.apply)  # type: ignore[attr-defined]


def run(ctx: Any, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """``function(*tensors)``. Keeps in ``ctx`` what ``grads`` needs; it has ``save_for_backward``."""
    ctx.save_for_backward(*tensors)
    ctx.function = function
    return function(*tensors)


def grads(ctx: Any, grad_output: Tensor) -> tuple[Tensor, ...]:
    """The gradients of the tensors that ``run`` took. Computes its function again."""
    return torch.func.vjp(ctx.function, *ctx.saved_tensors)[1](grad_output)


__all__ = ["AutogradClass", "grads", "run"]
