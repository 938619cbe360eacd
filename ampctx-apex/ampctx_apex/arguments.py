"""How apex's extension functions take their arguments. The messages of errors name the function and the argument."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ampctx import AmpTypeError, AmpValueError


def check_tensor(
    op: str,
    name: str,
    value: Any,
    *,
    dtypes: Sequence[torch.dtype] = (),
    shape: Sequence[int] | None = None,
    beside: tuple[str, Tensor] | None = None,
) -> Tensor:
    """Returns ``value``: a strided tensor of one of the ``dtypes``, of the shape, and on the device of ``beside``, a
    tensor with its name, where these are given."""
    where = f"{op}: {name}"
    if not isinstance(value, Tensor):
        raise AmpTypeError(f"{where} must be a tensor, got {type(value).__name__}")
    if value.layout is not torch.strided:
        raise AmpTypeError(f"{where} is not a strided tensor: pass {name}.to_dense()")
    if dtypes and value.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise AmpTypeError(f"{where} has dtype {value.dtype}, expected {names}")
    if shape is not None and tuple(value.shape) != tuple(shape):
        raise AmpValueError(f"{where} has shape {tuple(value.shape)}, expected {tuple(shape)}")
    if beside is not None and value.device != beside[1].device:
        raise AmpValueError(f"{where} is on {value.device}, and {beside[0]} is on {beside[1].device}")
    return value


def autocast_dtype(device: str) -> torch.dtype | None:
    """The type of autocast on a kind of device; None where it is off."""
    # Not every device has autocast: "meta" has none.
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def without_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    """A context in which ops on the device of ``tensor`` compute in the types that they are given."""
    device = tensor.device.type
    return nullcontext() if autocast_dtype(device) is None else torch.autocast(device, enabled=False)


def positional(op: str, arguments: str, body: Callable[..., Any]) -> Callable[..., Any]:
    """``body(**arguments)`` as the function ``op`` without gradients, of arguments as in ``"lr mode=1"``."""
    kind, empty = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    parts = [part.partition("=") for part in arguments.split()]
    signature = inspect.Signature(
        [inspect.Parameter(n, kind, default=ast.literal_eval(value) if value else empty) for n, _, value in parts]
    )

    @torch.no_grad()
    def function(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{op}: {error}") from None
        bound.apply_defaults()
        return body(**bound.arguments)

    vars(function)["__signature__"] = signature
    function.__name__ = function.__qualname__ = op
    return function


__all__ = ["autocast_dtype", "check_tensor", "positional", "without_autocast"]
