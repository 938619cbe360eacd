"""Shared by all casts: the walk over nested values, the rules for arguments, and switching autocast off."""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ampctx._errors import AmpTypeError

LOW_PRECISION = (torch.float16, torch.bfloat16)
Undo = Callable[[], None]
# How floating arguments are cast: "half" to the 16-bit dtype, "float" from 16 bits to fp32, "promote" to the widest
# dtype among them.
Rule = Literal["half", "float", "promote"]


class ModelHook:
    """Base of the hooks that amp registers on the user's modules."""


# --- the walk ---------------------------------------------------------------------------------------------------------


def map_leaves(value: Any, fn: Callable[[Any], Any], objects: bool = True) -> Any:
    """Applies ``fn`` to every tensor in a nested value. Returns the same object if nothing changed.

    Walks mappings, dataclasses, tuples, lists, deques, sets and their subclasses, and keeps their classes. Other
    objects with a ``to`` method go to ``fn`` too. The rest passes through unchanged, such as modules and iterators.

    Args:
        objects: False walks dicts, lists and tuples only. Use it for the arguments of a call: any other object may be
            the ``self`` of a method and must not be copied.

    Raises:
        AmpTypeError: a container can be neither copied nor rebuilt from its elements.
    """
    return _mapped(value, fn, objects)[0]


# Common arguments without tensors, to skip early; and objects whose ``to`` is not called.
_SCALARS = (type(None), bool, int, float, str)
_NOT_ASKED = (str, bytes, int, float, type, nn.Module)


def _mapped(value: Any, fn: Callable[[Any], Any], objects: bool) -> tuple[Any, bool]:
    """``map_leaves``, and whether the result is a new object. dynamo cannot compare tuples by ``is``."""
    if isinstance(value, Tensor):
        mapped = fn(value)
        return mapped, mapped is not value
    if objects and not isinstance(value, _NOT_ASKED) and callable(getattr(value, "to", None)):
        mapped = fn(value)
        return mapped, mapped is not value
    parts: Any
    if isinstance(value, dict) or (objects and isinstance(value, Mapping)):
        parts = dict(value)
    elif objects and is_dataclass(value):
        parts = {f.name: getattr(value, f.name) for f in fields(value) if hasattr(value, f.name)}
    elif isinstance(value, (tuple, list)) or (objects and isinstance(value, (deque, set, frozenset))):
        parts = list(value)
    else:
        return value, False
    changed = []
    for name, part in parts.items() if isinstance(parts, dict) else enumerate(parts):
        if type(part) in _SCALARS:
            continue
        mapped, is_new = _mapped(part, fn, objects)
        if is_new:
            parts[name] = mapped
            changed.append(name)
    return (_rebuilt(value, parts, changed), True) if changed else (value, False)


def _rebuilt(value: Any, parts: Any, changed: Sequence[Any]) -> Any:
    """A container like ``value`` that holds ``parts``, of which ``changed`` are new."""
    kind = type(value)
    if kind is type(parts):
        return parts
    try:
        if isinstance(parts, list) and (kind is set or isinstance(value, (tuple, frozenset))):
            return value._make(parts) if hasattr(value, "_make") else kind(parts)
        if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
            return kind(parts)
        # A copy keeps attributes, default factories and a deque's maxlen.
        result = copy.copy(value)
        if isinstance(parts, list):
            result.clear()
            result.update(parts) if isinstance(result, set) else result.extend(parts)
        elif isinstance(value, Mapping):
            # One by one, because a subclass may override assignment. Dynamo (2.13) copies mappings without their items.
            for name in parts if torch.compiler.is_compiling() else changed:
                result[name] = parts[name]
        else:
            for name in changed:
                object.__setattr__(result, name, parts[name])  # frozen dataclasses too
        return result
    except Exception as error:
        raise AmpTypeError(
            f"cannot rebuild a {kind.__module__}.{kind.__qualname__} with tensors of another dtype: {error}. Give the "
            "class a method to(dtype) that returns the cast object, or make it work with copy.copy."
        ) from error


def map_arguments(args: tuple, kwargs: dict[str, Any], fn: Callable[[Tensor], Tensor]) -> tuple[tuple, dict[str, Any]]:
    """Applies ``fn`` to the tensors among the arguments of a call. Two walks cost less than one walk of a pair."""
    return _mapped(args, fn, False)[0], _mapped(kwargs, fn, False)[0] if kwargs else kwargs


def tensors_in(args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
    found: list[Tensor] = []

    def note(t: Tensor) -> Tensor:
        found.append(t)
        return t

    map_arguments(args, kwargs, note)
    return found


# --- casts of one leaf, and of arguments ------------------------------------------------------------------------------


def to_dtype(dtype: torch.dtype, leaf: Any) -> Any:
    """``leaf.to(dtype)``. Integer tensors and those of that dtype stay the same object."""
    t = leaf.data if isinstance(leaf, PackedSequence) else leaf
    return leaf if isinstance(t, Tensor) and (t.dtype == dtype or not t.is_floating_point()) else leaf.to(dtype)


def widen(leaf: Any) -> Any:
    """Casts fp16 and bf16 to fp32, and asks other objects for ``leaf.to(torch.float32)``."""
    if isinstance(leaf, (Tensor, PackedSequence)):
        dtype = leaf.dtype if isinstance(leaf, Tensor) else leaf.data.dtype
        return leaf.float() if dtype in LOW_PRECISION else leaf
    return leaf.to(torch.float32)


def map_floating(value: Any, dtype: torch.dtype) -> Any:
    """Casts every floating tensor in ``value`` to ``dtype``, and other objects by their ``to(dtype)``."""
    return _mapped(value, functools.partial(to_dtype, dtype), True)[0]


def leaf_cast(rule: Rule, args: tuple, kwargs: dict[str, Any], low: torch.dtype) -> Callable[[Tensor], Tensor]:
    """The cast that ``rule`` applies to each tensor argument of a call. ``low``: the dtype for "half"."""
    if rule == "float":
        return widen
    if rule == "promote" and (dtypes := {t.dtype for t in tensors_in(args, kwargs) if t.is_floating_point()}):
        low = functools.reduce(torch.promote_types, dtypes)
    return functools.partial(to_dtype, low)


def names_dtype(args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether the caller passed a dtype, which casts must not override."""
    return torch.dtype in map(type, (*args, *kwargs.values()))


# --- autocast off -----------------------------------------------------------------------------------------------------


@contextmanager
def autocast_off() -> Iterator[None]:
    """Switches torch's autocast off on the CPU and on the machine's accelerator. Decorates functions, too."""
    accelerator = torch.accelerator.current_accelerator()
    with autocast_off_on(["cpu"] if accelerator is None else ["cpu", accelerator.type]):
        yield


@contextmanager
def autocast_off_on(device_types: Sequence[str]) -> Iterator[None]:
    """Switches torch's autocast off for each device type."""
    if not device_types:
        yield
        return
    first, *others = device_types
    # dynamo cannot trace an ExitStack.
    off = torch.autocast(first, enabled=False) if torch.is_autocast_enabled(first) else nullcontext()
    with off, autocast_off_on(others):
        yield
