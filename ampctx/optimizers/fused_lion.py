"""Lion with one op call for each bucket of parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ampctx.optimizers._base import FusedOptimizer


class FusedLion(FusedOptimizer):
    """Implements Lion (Chen et al. 2023): each element moves by lr, in the direction of the sign of averaged gradients.
    No host sync in ``step``.

    ``ampctx.optimizer_ops.lion`` has the formula. State of each parameter: ``step`` and ``exp_avg``; fp32 by default.

    Args:
        params: parameters or groups, on any mix of devices and dtypes.
        lr: a number >= 0, or a one-element tensor. The paper uses a third to a tenth of AdamW's.
        betas, weight_decay: of the formula. The decay is decoupled.
        set_grad_none: whether ``zero_grad()`` sets gradients to None.
        maximize, write_back, seed, master_weights, capturable, state_dtype, min_8bit_size, offload: see
            ``FusedOptimizer``.
    """

    _op = "lion"

    def __init__(
        self, params: Any, lr: float | Tensor = 1e-4, betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0, set_grad_none: bool = True, *, maximize: bool = False, write_back: str = "nearest",
        seed: int = 0, master_weights: bool | str = False, capturable: bool = False,
        state_dtype: Any = torch.float32, min_8bit_size: int = 4096,
        offload: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, set_grad_none=set_grad_none,
            maximize=maximize, write_back=write_back, seed=seed, master_weights=master_weights, capturable=capturable,
            state_dtype=state_dtype, min_8bit_size=min_8bit_size,
            offload=offload,
        )  # fmt: skip
