"""Loops over tensors that each block and step makes: attributes, gradients, versions, "is all as before".

A line of Python for each tensor costs more than the kernel of a small one. So each loop is ``map`` over C functions.
For the same reason avoid dicts with tensor keys: torch hashes tensors in Python.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

grad_of: Any = operator.attrgetter("grad")
_of_tensor: Any = Tensor
# Bypasses the property ``grad`` of a subclass.
stored_grad: Any = _of_tensor.grad.__get__
dtype_of: Any = _of_tensor.dtype.__get__
device_of: Any = _of_tensor.device.__get__
layout_of: Any = _of_tensor.layout.__get__
# Private name. torch has no public way to see a write without reading the tensor.
version_of: Any = operator.attrgetter("_version")
increment_version = torch.autograd.graph.increment_version


def is_fake(t: Tensor) -> bool:
    """Whether it is one of FakeTensorMode, which has neither numbers nor an address. The class is private."""
    return type(t).__name__ == "FakeTensor"


def has_values(t: Tensor) -> bool:
    return not (t.is_meta or is_fake(t))


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


def all_resolved(tensors: Collection[Tensor]) -> bool:
    """Whether the values of each tensor are those in its memory. torch negates or conjugates others as it reads them,
    and takes a ZeroTensor, which has no memory, for zeros. True in graphs, where torch resolves them."""
    if torch.compiler.is_compiling():
        return True
    # _is_zerotensor is private; torch has no public name for it.
    negated, conjugated = any(map(Tensor.is_neg, tensors)), any(map(Tensor.is_conj, tensors))
    return not (negated or conjugated or any(map(Tensor._is_zerotensor, tensors)))


def store_grads(tensors: Iterable[Tensor], grads: Iterable[Tensor | None]) -> None:
    """Sets the gradient of each tensor, past the property ``grad`` of a subclass."""
    deque(map(_of_tensor.grad.__set__, tensors, grads), maxlen=0)


def clear_grads(tensors: Iterable[Tensor]) -> None:
    """``grad = None`` for each tensor."""
    set_each(tensors, "grad", None)
