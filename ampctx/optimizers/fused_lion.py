"""Lion with one op call for each bucket of parameters."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from ampctx.optimizers._base import FusedOptimizer, SharedOptions


class FusedLion(FusedOptimizer):
    """Implements Lion (Chen et al. 2023): each element moves by lr, in the direction of the sign of averaged gradients.
    No host sync in ``step``.

    ``ampctx.optimizer_ops.lion`` has the formula. State of each parameter: ``step`` and ``exp_avg``; fp32 by default.

    Args:
        params: parameters or groups, on any mix of devices and dtypes.
        lr: a number >= 0, or a one-element tensor. The paper uses a third to a tenth of AdamW's.
        betas, weight_decay: of the formula. The decay is decoupled.
        params, lr, set_grad_none, and the keywords: see ``FusedOptimizer``.
    """

    _op = "lion"
    _defaults = ("lr", "betas", "weight_decay")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        **shared: Unpack[SharedOptions],
    ) -> None:
        super().__init__(params, locals())
