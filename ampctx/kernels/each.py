"""Passes over thousands of tensors inside the interpreter: functions in C for ``map``, and what is often asked of them.

A line of Python for each tensor costs more than the kernels take for a small one. Dicts with tensors for keys are left
alone, too: torch hashes tensors in Python.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable
from itertools import repeat
from typing import Any

from torch import Tensor

grad_of: Any = operator.attrgetter("grad")
_of_tensor: Any = Tensor  # whose attributes are descriptors
# The attribute itself, below a property of the same name.
stored_grad: Any = _of_tensor.grad.__get__
dtype_of: Any = _of_tensor.dtype.__get__
device_of: Any = _of_tensor.device.__get__
layout_of: Any = _of_tensor.layout.__get__
# Private by name; nothing public tells that a tensor changed without reading it.
version_of: Any = operator.attrgetter("_version")


def set_each(objects: Iterable[Any], name: str, value: Any) -> None:
    """``setattr`` for each of them."""
    deque(map(setattr, objects, repeat(name), repeat(value)), maxlen=0)


def all_none(items: Iterable[Any]) -> bool:
    return all(map(operator.is_, items, repeat(None)))


def all_there(items: Iterable[Any]) -> bool:
    """Whether none of them is None."""
    return all(map(operator.is_not, items, repeat(None)))
