"""Checks of tensors that apex's extension functions take. The messages name the function and the argument."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ampctx.spi import check_tensor


def autocast_dtype(device: str) -> torch.dtype | None:
    """The type of autocast on a kind of device; None where it is off."""
    # Not every device has autocast: "meta" has none.
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def without_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    """A context in which ops on the device of ``tensor`` compute in the types that they are given."""
    device = tensor.device.type
    return nullcontext() if autocast_dtype(device) is None else torch.autocast(device, enabled=False)


__all__ = ["autocast_dtype", "check_tensor", "without_autocast"]
