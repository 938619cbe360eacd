"""Adagrad with one op call for each bucket of parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ampctx._errors import AmpValueError
from ampctx.optimizers._base import FusedOptimizer
from ampctx.optimizers._checkpoint import SavedGroup
from ampctx.optimizers._options import Group, check_number


class FusedAdagrad(FusedOptimizer):
    """Implements Adagrad (Duchi et al. 2011), without lr decay. No host sync in ``step``.

    ``ampctx.optimizer_ops.adagrad`` has the formula. State of each parameter: ``step`` and ``sum``, fp32. Checkpoints
    have the format of torch.optim.Adagrad with lr_decay=0.

    Args:
        params: parameters or groups, on any mix of devices and dtypes.
        lr: a number >= 0, or a one-element tensor.
        eps, weight_decay: as in torch.optim.Adagrad.
        set_grad_none: whether ``zero_grad()`` sets gradients to None.
        adagrad_w_mode: use decoupled weight decay.
        maximize, write_back, seed, master_weights, capturable, offload: see
            ``FusedOptimizer``.
        state_dtype: torch.float32 only. The sum grows, and fewer bits would stop it.
    """

    _op = "adagrad"

    def __init__(
        self, params: Any, lr: float | Tensor = 1e-2, eps: float = 1e-10, weight_decay: float = 0.0,
        set_grad_none: bool = True, adagrad_w_mode: bool = False, *, maximize: bool = False,
        write_back: str = "nearest", seed: int = 0, master_weights: bool | str = False, capturable: bool = False,
        state_dtype: Any = torch.float32,
        offload: str | None = None,
    ) -> None:  # fmt: skip
        self.adagrad_w_mode = 1 if adagrad_w_mode else 0
        # torch.optim.Adagrad needs lr_decay in a checkpoint.
        defaults = {"lr": lr, "eps": eps, "weight_decay": weight_decay, "lr_decay": 0.0}
        super().__init__(
            params, defaults, set_grad_none=set_grad_none, maximize=maximize, write_back=write_back, seed=seed,
            master_weights=master_weights, capturable=capturable, state_dtype=state_dtype,
            offload=offload,
        )  # fmt: skip

    def _check_options(self, group: Group) -> None:
        super()._check_options(group)
        _refuse_lr_decay(group)

    def _adapt_checkpoint(self, group: SavedGroup) -> None:
        super()._adapt_checkpoint(group)
        _refuse_lr_decay(group.saved)


def _refuse_lr_decay(group: Group) -> None:
    if check_number("lr_decay", group.get("lr_decay", 0)) != 0:
        raise AmpValueError(
            f"lr_decay is {group['lr_decay']}, and FusedAdagrad has none: use an LR scheduler, or torch.optim.Adagrad."
        )
