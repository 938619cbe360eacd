"""apex._autocast_utils: the dtype of torch.autocast, and casts to it."""

from typing import Any

import torch
from ampctx_apex.arguments import autocast_dtype
from torch import Tensor

from ampctx.spi import map_leaves


def _get_autocast_dtypes() -> list[torch.dtype]:
    """The 16-bit types that the device computes in."""
    if torch.cuda.is_available() and not torch.cuda.is_bf16_supported():
        return [torch.float16]
    return [torch.float16, torch.bfloat16]


def _get_current_dtype(dtype: torch.dtype | None = None) -> torch.dtype:
    """The type of autocast on the accelerator (the CPU without one); fp32 where it is off. ``dtype`` has no effect."""
    accelerator = torch.accelerator.current_accelerator()
    return autocast_dtype("cpu" if accelerator is None else accelerator.type) or torch.float32


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
