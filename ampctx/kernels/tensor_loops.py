"""Loops over tensors that each block and step makes: attributes, gradients, versions, "is all as before".

A line of Python for each tensor costs more than the kernel of a small one. So each loop is ``map`` over C functions, or
a function of the library (csrc/python_passes.h), which takes the place of the one here. For the same reason avoid dicts
with tensor keys: torch hashes tensors in Python.
"""

from __future__ import annotations

import operator
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

grad_of: Any = operator.attrgetter("grad")
_of_tensor: Any = Tensor
# Bypasses the property ``grad`` of a subclass.
stored_grad: Any = _of_tensor.grad.__get__
dtype_of: Any = _of_tensor.dtype.__get__
device_of: Any = _of_tensor.device.__get__
layout_of: Any = _of_tensor.layout.__get__
# Private name. torch has no public way to see a write without reading the tensor.
version_of: Any = operator.attrgetter("_version")


def is_resolved(tensor: Tensor) -> bool:
    """Whether the tensor's values are those in its memory. torch negates or conjugates others as it reads them, and
    takes a ZeroTensor, which has no memory, for zeros."""
    # _is_zerotensor is private; torch has no public name for it.
    return not (tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor())


def set_each(objects: Iterable[Any], name: str, value: Any) -> None:
    """``setattr(object, name, value)`` for each object."""
    deque(map(setattr, objects, repeat(name), repeat(value)), maxlen=0)


def all_none(items: Iterable[Any]) -> bool:
    return all(map(operator.is_, items, repeat(None)))


def all_there(items: Iterable[Any]) -> bool:
    """Whether no item is None."""
    return all(map(operator.is_not, items, repeat(None)))


def same_items(items: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two lists hold the same objects, in order."""
    return len(items) == len(others) and all(map(operator.is_, items, others))


def members_of(groups: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """A copy of each group's list of parameters."""
    return [list(group["params"]) for group in groups]


def same_members(groups: Sequence[Mapping[str, Any]], members: list[list[Any]]) -> bool:
    """Whether the param groups hold the parameters of ``members_of``, each in its group, in order."""
    return len(groups) == len(members) and all(
        same_items(group["params"], params) for group, params in zip(groups, members, strict=True)
    )


def same_mapping(mapping: Mapping[Any, Any], keys: list[Any], values: list[Any]) -> bool:
    """Whether a dict has these keys and values and no others, in order."""
    return same_items(list(mapping), keys) and same_items(list(mapping.values()), values)


def same_entries(dicts: list[dict[str, Any]], keys: list[str], columns: list[list[Any]]) -> bool:
    """Whether ``dicts[i][keys[k]]`` is ``columns[k][i]``, for all of them."""
    return all(
        same_items([entries.get(key) for entries in dicts], column) for key, column in zip(keys, columns, strict=True)
    )


def nothing_changed(
    groups: Sequence[Mapping[str, Any]], members: list[list[Any]], number: int, kinds: bytes, leaves: list[Any]
) -> bool:
    """Whether the groups hold the members, the tensors of a held list are of the ``kinds`` of ``held_kinds``, and no
    leaf has a gradient."""
    return same_members(groups, members) and held_kinds(number) == kinds and have_no_grad(leaves, False)


def same_plan(
    kept: list[Any],
    groups: Sequence[Mapping[str, Any]],
    state: Mapping[Any, Any],
    models: Mapping[Any, Any],
    pending: Sequence[Any],
) -> bool:
    """Whether the calls of a step are those of the step before. ``kept`` is one list, for the library: the groups and
    their members; keys and values of the state; those of ``models``; ``pending``; the parameters without a gradient;
    and of each call the three arguments of ``same_entries``."""
    of_groups, members, keys, values, masters, weights, of_pending, idle, *calls = kept
    return (
        same_items(groups, of_groups)
        and same_members(groups, members)
        and same_mapping(state, keys, values)
        and same_mapping(models, masters, weights)
        and same_items(pending, of_pending)
        and all(map(same_entries, calls[::3], calls[1::3], calls[2::3]))
        and have_no_grad(idle, False)
    )


def are_plain(tensors: list[Tensor]) -> bool:
    """Whether the library reads tensors of all these types."""
    return False


def are_resolved(tensors: list[Tensor]) -> bool:
    """Whether each tensor ``is_resolved``. The library answers for tensors of the types that it reads."""
    return all(map(is_resolved, tensors))


def all_resolved(tensors: Sequence[Tensor]) -> bool:
    """``are_resolved``, for tensors of any type. True in graphs, where torch resolves them."""
    if torch.compiler.is_compiling():
        return True
    listed = tensors if type(tensors) is list else list(tensors)
    return bool(are_resolved(listed)) or all(map(is_resolved, listed))


def have_no_grad(tensors: list[Tensor], stored: bool) -> bool:
    """Whether no tensor has a gradient. ``stored``: torch's own attribute, also of a type with a property ``grad``."""
    return all_none(map(stored_grad if stored else grad_of, tensors))


def clear_grads(tensors: list[Tensor], stored: bool) -> None:
    """``grad = None`` for each tensor. ``stored``: as for ``have_no_grad``, of types that the library reads."""
    set_each(tensors, "grad", None)


def bump_each(tensors: list[Tensor]) -> bool:
    """Bumps the version of each tensor. False, and none is bumped, where the library does not know one."""
    return False


def bump_versions(tensors: Sequence[Tensor]) -> None:
    """Tells autograd that the tensors changed."""
    listed = tensors if type(tensors) is list else list(tensors)
    if not bump_each(listed):
        increment_version(listed)


def held_kinds(number: int) -> bytes:
    """Dtype and device of each tensor of a held list, to compare."""
    return b""


def write_counts(tensors: list[Tensor], number: int) -> bytes:
    """``counted`` for a held list that begins with the tensors."""
    return counted(tensors, 0)


def counted(tensors: list[Tensor], number: int) -> bytes:
    """Identity, version and address of each tensor, to compare. ``number``: of a held list that begins with them, or 0
    if they are not held."""
    if number:
        return write_counts(tensors, number)
    counts = zip(map(id, tensors), map(version_of, tensors), map(Tensor.data_ptr, tensors), strict=True)
    return array("q", chain.from_iterable(counts)).tobytes()


def counts_in(counts: bytes) -> Iterator[tuple[int, int, int]]:
    """(identity, version, address) of each tensor of ``counted``."""
    numbers = memoryview(counts).cast("q").tolist()
    return zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)


def use(functions: Mapping[str, Callable[..., Any]]) -> None:
    """Puts the functions of the library in the place of these."""
    globals().update(functions)
