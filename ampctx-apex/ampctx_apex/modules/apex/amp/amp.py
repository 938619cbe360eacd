"""apex.amp.amp: the function decorators, and ``init``, which switches on casts without ``initialize``."""

from __future__ import annotations

from typing import Any

import torch

from ampctx.spi import Autocast, session

from ._amp_state import _amp_state
from .handle import Handle


def init(
    enabled: bool = True,
    loss_scale: Any = None,
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
    *,
    patch_type: torch.dtype = torch.float16,
) -> Handle:
    """Switches on the casts of O1 in this thread, on the CPU and the accelerator, until ``_deactivate()`` or a reset.

    Args:
        enabled: False switches on nothing.
        loss_scale, enable_caching, verbose: taken without an effect.
        allow_banned: binary_cross_entropy of 16-bit arguments is computed in fp32 in place of refused.
        patch_type: float16, or bfloat16 for the casts of O4.
    """
    if not enabled:
        return Handle(None)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    devices = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    session.cast_ops(Autocast([], patch_type, device_types=devices, allow_banned=allow_banned))
    return _amp_state.handle
