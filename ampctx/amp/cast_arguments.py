"""What casts per op and casts per function share: walking arguments, autocast off, attributes replaced for a while."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

LOW_PRECISION = (torch.float16, torch.bfloat16)
Undo = Callable[[], None]


class ModelHook:
    """A hook that amp puts on the user's modules."""


def map_floating_args(value: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """``fn`` over the floating tensors in nested lists, tuples and dicts; the same object where nothing changed."""
    if isinstance(value, Tensor):
        return fn(value) if value.is_floating_point() else value
    if isinstance(value, dict):
        new = {k: map_floating_args(v, fn) for k, v in value.items()}
        unchanged = not torch.compiler.is_compiling() and all(new[k] is v for k, v in value.items())
        return value if unchanged else new
    if isinstance(value, (list, tuple)):
        elements = [map_floating_args(v, fn) for v in value]
        # dynamo cannot compare containers by identity.
        if not torch.compiler.is_compiling() and all(a is b for a, b in zip(elements, value, strict=True)):
            return value
        return value._make(elements) if hasattr(value, "_make") else type(value)(elements)
    return value


def floating_dtypes(value: Any) -> set[torch.dtype]:
    found: set[torch.dtype] = set()

    def look(t: Tensor) -> Tensor:
        found.add(t.dtype)
        return t

    map_floating_args(value, look)
    return found


def to_widest(args: Any) -> Any:
    dtypes = floating_dtypes(args)
    if len(dtypes) < 2:
        return args
    widest = functools.reduce(torch.promote_types, dtypes)
    return map_floating_args(args, lambda t: t.to(widest))


@contextmanager
def autocast_off() -> Iterator[None]:
    """torch's autocast off on the CPU and on the machine's accelerator, where it is on."""
    accelerator = torch.accelerator.current_accelerator()
    # Nested blocks rather than an ExitStack, which dynamo cannot trace with autocast in it.
    with torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext():
        if accelerator is None or not torch.is_autocast_enabled(accelerator.type):
            yield
        else:
            with torch.autocast(accelerator.type, enabled=False):
                yield


_MISSING = object()


def replace_attribute(owner: Any, name: str, replacement: Any) -> Undo:
    """Sets an attribute. The undo puts back what was there, or deletes it where it was inherited."""
    former = vars(owner).get(name, _MISSING) if hasattr(owner, "__dict__") else getattr(owner, name)
    setattr(owner, name, replacement)

    def undo() -> None:
        # Somebody may have wrapped the replacement since; it then stays where it is and passes through.
        if inspect.getattr_static(owner, name, None) is not replacement:
            return
        if former is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, former)

    return undo
