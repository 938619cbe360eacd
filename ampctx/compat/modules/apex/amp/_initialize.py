"""apex.amp._initialize: the casters, which clients put around a wrapped model's forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ampctx.casts.arguments import map_leaves
from ampctx.compat.install import refused

from ._amp_state import _amp_state, warn_or_err
from .handle import disable_casts
from .scaler import LossScaler


def to_type(dtype: torch.dtype, t: Any) -> Any:
    """A floating tensor in ``dtype``, other tensors as they are; of anything else ``t.to(dtype)``."""
    return t if isinstance(t, torch.Tensor) and not t.is_floating_point() else t.to(dtype)


def applier(value: Any, fn: Callable[[Any], Any]) -> Any:
    """``fn`` of the tensors, and of objects with a ``to`` method, in a nest of containers, which keep their types."""
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
