"""apex.amp.compat: tests for old torch versions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def variable_is_tensor() -> bool:
    """True, as in every torch from 0.4 on."""
    return True


def tensor_is_variable() -> bool:
    """False, as in every torch from 0.4 on."""
    return False


def tensor_is_float_tensor() -> bool:
    """False, as in every torch from 0.4 on."""
    return False


def is_tensor_like(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def is_floating_point(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def scalar_python_val(x: Any) -> Any:
    """The number in a tensor of one element, or the first of a sequence. A host sync for a tensor on an accelerator."""
    return x.item() if hasattr(x, "item") else x[0]


def filter_attrs(module: Any, attrs: Iterable[str]) -> list[str]:
    """The names among ``attrs`` that ``module`` has."""
    return [name for name in attrs if hasattr(module, name)]


__all__ = [
    "filter_attrs",
    "is_floating_point",
    "is_tensor_like",
    "scalar_python_val",
    "tensor_is_float_tensor",
    "tensor_is_variable",
    "variable_is_tensor",
]
