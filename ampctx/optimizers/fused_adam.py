"""Adam and AdamW with one op call for each bucket of parameters."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from ampctx._errors import AmpValueError
from ampctx.optimizers._base import CommonOptions, FusedOptimizer, MasterWeights
from ampctx.optimizers._checkpoint import SavedGroup
from ampctx.optimizers._options import check_flag


class FusedAdam(FusedOptimizer):
    """Implements AdamW (Loshchilov and Hutter 2019), or Adam (Kingma and Ba 2015) with ``adam_w_mode=False``. No host
    sync in ``step``.

    ``ampctx.optimizer_ops.adam`` has the formula. State of each parameter: ``step``, ``exp_avg``, ``exp_avg_sq`` and,
    with ``amsgrad``, ``max_exp_avg_sq``; fp32 by default. Checkpoints have the format of torch.optim.Adam and AdamW.

    Args:
        bias_correction, betas, eps, weight_decay, amsgrad: as in torch.optim.Adam.
        adam_w_mode: use decoupled weight decay. False adds weight_decay * p to the gradient.
        params, lr, set_grad_none, capturable, master_weights, and the keywords maximize, write_back, seed, state_dtype,
            min_8bit_size: see ``FusedOptimizer``.
    """

    _op = "adam"
    _defaults = ("lr", "bias_correction", "betas", "eps", "weight_decay", "amsgrad")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: MasterWeights = False,
        **shared: Unpack[CommonOptions],
    ) -> None:
        self.adam_w_mode = 1 if adam_w_mode else 0
        super().__init__(params, locals())

    def _adapt_checkpoint(self, group: SavedGroup) -> None:
        super()._adapt_checkpoint(group)
        ours = bool(self.adam_w_mode)
        compare_decay(group, ours, f"FusedAdam has adam_w_mode={ours}", f"Pass adam_w_mode={not ours}")


def compare_decay(group: SavedGroup, ours: bool, has: str, fix: str) -> None:
    """Refuses a checkpoint whose ``decoupled_weight_decay``, an option of torch's groups, is not what we do."""
    theirs = group.saved.get("decoupled_weight_decay")
    if theirs is None:
        return
    theirs = check_flag("decoupled_weight_decay", theirs)
    if theirs != ours and group.saved.get("weight_decay"):
        raise AmpValueError(
            f"the checkpoint was made with decoupled_weight_decay={theirs}, and {has}. Its weight_decay would have "
            f"another meaning. {fix}, or delete 'decoupled_weight_decay' from its param groups."
        )
    group.saved["decoupled_weight_decay"] = ours
