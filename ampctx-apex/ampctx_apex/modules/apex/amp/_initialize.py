"""apex.amp._initialize: the casters, which clients wrap around a model's forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from ampctx_apex.install import refused

from ampctx.spi import map_leaves

from ._amp_state import _amp_state, warn_or_err
from .handle import disable_casts
from .scaler import LossScaler


def to_type(dtype: torch.dtype, t: Any) -> Any:
    """Casts floating tensors to ``dtype``, returns other tensors unchanged, and calls ``t.to(dtype)`` of the rest."""
    return t if isinstance(t, torch.Tensor) and not t.is_floating_point() else t.to(dtype)


def applier(value: Any, fn: Callable[[Any], Any]) -> Any:
    """Applies ``fn`` to tensors and objects with a ``to`` method in nested containers, which keep their types."""
    return map_leaves(value, fn)


_initialize = refused("apex.amp._initialize._initialize")
check_models = refused("apex.amp._initialize.check_models")
check_optimizers = refused("apex.amp._initialize.check_optimizers")
check_params_fp32 = refused("apex.amp._initialize.check_params_fp32")
O2StateDictHook = refused("apex.amp._initialize.O2StateDictHook")

__all__ = [
    "LossScaler",
    "O2StateDictHook",
    "_amp_state",
    "_initialize",
    "applier",
    "check_models",
    "check_optimizers",
    "check_params_fp32",
    "disable_casts",
    "to_type",
    "warn_or_err",
]
