"""Checks of tensors that apex's extension functions take. The messages name the function and the argument."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ampctx import AmpTypeError, AmpValueError


def check_tensor(
    op: str,
    name: str,
    value: Any,
    *,
    dtypes: Sequence[torch.dtype] = (),
    shape: Sequence[int] | None = None,
    beside: tuple[str, Tensor] | None = None,
) -> Tensor:
    """Returns ``value``, a strided tensor.

    Args:
        dtypes: those that it may have; any without them.
        shape: its shape; any without it.
        beside: the name and the tensor whose device it must share.

    Raises:
        AmpTypeError, AmpValueError: it is something else. The message names the argument and what it may be.
    """
    where = f"{op}: {name}"
    if not isinstance(value, Tensor):
        raise AmpTypeError(f"{where} must be a tensor, got {type(value).__name__}")
    if value.layout is not torch.strided:
        raise AmpTypeError(f"{where} is not a strided tensor: pass {name}.to_dense()")
    if dtypes and value.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise AmpTypeError(f"{where} has dtype {value.dtype}, expected {names}")
    if shape is not None and tuple(value.shape) != tuple(shape):
        raise AmpValueError(f"{where} has shape {tuple(value.shape)}, expected {tuple(shape)}")
    if beside is not None and value.device != beside[1].device:
        raise AmpValueError(f"{where} is on {value.device}, and {beside[0]} is on {beside[1].device}")
    return value


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
