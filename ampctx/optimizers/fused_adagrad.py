"""Adagrad with one op call for each bucket of parameters."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from ampctx._errors import AmpValueError
from ampctx.optimizers._base import FusedOptimizer, SharedOptions
from ampctx.optimizers._checkpoint import SavedGroup
from ampctx.optimizers._options import Group, check_number


class FusedAdagrad(FusedOptimizer):
    """Implements Adagrad (Duchi et al. 2011), without lr decay. No host sync in ``step``.

    ``ampctx.optimizer_ops.adagrad`` has the formula. State of each parameter: ``step`` and ``sum``, fp32. Checkpoints
    have the format of torch.optim.Adagrad with lr_decay=0.

    Args:
        eps, weight_decay: as in torch.optim.Adagrad.
        adagrad_w_mode: use decoupled weight decay.
        params, lr, set_grad_none, and the keywords but ``min_8bit_size``: see ``FusedOptimizer``.
        state_dtype: torch.float32 only. The sum grows, and fewer bits would stop it.
    """

    _op = "adagrad"
    _defaults = ("lr", "eps", "weight_decay", "lr_decay")
    _refused = ("min_8bit_size",)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
        **shared: Unpack[SharedOptions],
    ) -> None:
        self.adagrad_w_mode = 1 if adagrad_w_mode else 0
        # torch.optim.Adagrad needs it in a checkpoint.
        lr_decay = 0.0
        super().__init__(params, locals())

    def _check_options(self, group: Group) -> None:
        super()._check_options(group)
        _refuse_lr_decay(group)

    def _adapt_checkpoint(self, group: SavedGroup) -> None:
        _refuse_lr_decay(group.saved)


def _refuse_lr_decay(group: Group) -> None:
    if check_number("lr_decay", group.get("lr_decay", 0)) != 0:
        raise AmpValueError(
            f"lr_decay is {group['lr_decay']}, and FusedAdagrad has none: use an LR scheduler, or torch.optim.Adagrad."
        )
