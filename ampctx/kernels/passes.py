"""Passes over lists and dicts of tensors that each block and step makes: is all as before, is nothing there.

The library has them in C (csrc/python_passes.h), because a loop of Python costs more for a small tensor than its
kernel. Without the library these run.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ampctx.kernels.each import all_none, grad_of, is_resolved, set_each, stored_grad, version_of


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
    kept: list[Any], groups: Sequence[Mapping[str, Any]], state: Mapping[Any, Any], models: Mapping[Any, Any],
    lazy: Sequence[Any],
) -> bool:  # fmt: skip
    """Whether the calls of a step are those of the step before. ``kept`` is one list, for the library: the groups and
    their members; keys and values of the state; those of ``models``; ``lazy``; the parameters without a gradient; and
    of each call the three arguments of ``same_entries``."""
    of_groups, members, keys, values, masters, weights, of_lazy, idle, *calls = kept
    return (
        same_items(groups, of_groups)
        and same_members(groups, members)
        and same_mapping(state, keys, values)
        and same_mapping(models, masters, weights)
        and same_items(lazy, of_lazy)
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
