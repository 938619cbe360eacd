"""apex._autocast_utils: the dtype of torch.autocast, and casts to it."""

from typing import Any

import torch
from ampctx_apex.arguments import autocast_dtype
from torch import Tensor

from ampctx.spi import map_leaves


def _cast(tensor: Tensor) -> Tensor:
    dtype = autocast_dtype(tensor.device.type)
    if dtype is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)


def _cast_if_autocast_enabled(*args: Any) -> tuple[Any, ...]:
    """``args``, where floating tensors have the type of their device's autocast. fp64 and all else stays.

    Dicts, lists and tuples among them are searched.
    """
    return map_leaves(args, _cast, objects=False)


__all__ = ["_cast_if_autocast_enabled"]
