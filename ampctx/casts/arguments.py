"""What casts per op and casts per function share: walking arguments, autocast off, attributes replaced for a while."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

LOW_PRECISION = (torch.float16, torch.bfloat16)
Undo = Callable[[], None]


class ModelHook:
    """A hook that amp puts on the user's modules."""


def map_floating_args(value: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """``fn`` over the floating tensors in nested lists, tuples and dicts; the same object where nothing changed."""
    return _mapped(value, fn)[0]


def _mapped(value: Any, fn: Callable[[Tensor], Tensor]) -> tuple[Any, bool]:
    """``map_floating_args``, and whether that is another object: dynamo cannot tell by ``is`` of tuples."""
    if isinstance(value, Tensor):
        new = fn(value) if value.is_floating_point() else value
        return new, new is not value
    if not isinstance(value, (dict, list, tuple)):
        return value, False
    parts = [_mapped(v, fn) for v in (value.values() if isinstance(value, dict) else value)]
    if not any(is_new for _, is_new in parts):
        return value, False
    elements = [part for part, _ in parts]
    if isinstance(value, dict):
        return dict(zip(value, elements, strict=True)), True
    return (value._make(elements) if hasattr(value, "_make") else type(value)(elements)), True


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


def autocast_off() -> AbstractContextManager:
    """torch's autocast off on the CPU and on the machine's accelerator, where it is on."""
    accelerator = torch.accelerator.current_accelerator()
    return autocast_off_on(["cpu"] if accelerator is None else ["cpu", accelerator.type])


@contextmanager
def autocast_off_on(device_types: Sequence[str]) -> Iterator[None]:
    """torch's autocast off for each of the types, where it is on."""
    if not device_types:
        yield
        return
    first, *others = device_types
    # No ExitStack, which dynamo cannot trace.
    off = torch.autocast(first, enabled=False) if torch.is_autocast_enabled(first) else nullcontext()
    with off, autocast_off_on(others):
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
