"""apex.amp.amp: the function decorators, and ``init``, which switches on casts without ``initialize``."""

from __future__ import annotations

from typing import Any

import torch

from ampctx.amp import (
    bfloat16_function,
    float_function,
    half_function,
    promote_function,
    register_bfloat16_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from ampctx.spi import Autocast, session

from ._amp_state import _amp_state
from .frontend import initialize, load_state_dict, state_dict
from .handle import AmpHandle, NoOpHandle


def init(
    enabled: bool = True,
    loss_scale: float | str = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
    *,
    patch_type: torch.dtype = torch.float16,
) -> AmpHandle | NoOpHandle:
    """Switches on the casts of O1 in this thread, on the CPU and the accelerator, until ``_deactivate()`` or a reset.

    Args:
        enabled: False switches on nothing and returns a ``NoOpHandle``.
        loss_scale: of ``handle._default_scaler``.
        enable_caching, verbose: taken, and shown by the handle, without an effect.
        allow_banned: binary_cross_entropy of 16-bit arguments is computed in fp32 in place of refused.
        patch_type: float16, or bfloat16 for the casts of O4.
    """
    if not enabled:
        return NoOpHandle()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    devices = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    autocast = Autocast([], patch_type, device_types=devices, allow_banned=allow_banned)
    handle = AmpHandle._over(autocast, loss_scale=loss_scale, enable_caching=enable_caching, verbose=verbose)
    session.cast_ops(autocast)
    _amp_state._handle = handle
    return handle


def __getattr__(name: str) -> Any:
    if name == "_DECORATOR_HANDLE":
        return getattr(_amp_state, "handle", None)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "AmpHandle",
    "NoOpHandle",
    "bfloat16_function",
    "float_function",
    "half_function",
    "init",
    "initialize",
    "load_state_dict",
    "promote_function",
    "register_bfloat16_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "state_dict",
]
