"""Fast tensor loops: ``map`` over C functions avoids one Python line per tensor.

Such a line costs more than the kernel of a small tensor. For the same reason avoid dicts with tensor keys: torch hashes
tensors in Python.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable
from itertools import repeat
from typing import Any

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
