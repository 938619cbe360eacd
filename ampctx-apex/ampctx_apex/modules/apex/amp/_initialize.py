"""apex.amp._initialize: the casters, which clients wrap around a model's forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ampctx.spi import map_leaves


def to_type(dtype: torch.dtype, t: Any) -> Any:
    """Casts floating tensors to ``dtype``, returns other tensors unchanged, and calls ``t.to(dtype)`` of the rest."""
    return t if isinstance(t, torch.Tensor) and not t.is_floating_point() else t.to(dtype)


def applier(value: Any, fn: Callable[[Any], Any]) -> Any:
    """Applies ``fn`` to tensors and objects with a ``to`` method in nested containers, which keep their types."""
    return map_leaves(value, fn)
