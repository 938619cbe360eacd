"""LAMB with one op call for each bucket of parameters, after one pass for the norm of all gradients."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from ampctx.kernels import foreach
from ampctx.kernels.foreach import PerDevice, Unread
from ampctx.optimizers import layerwise
from ampctx.optimizers._base import FusedOptimizer, SharedOptions
from ampctx.optimizers._options import Group, check_number
from ampctx.optimizers._work import Work
from ampctx.weights.step import Step


class FusedLAMB(FusedOptimizer):
    """Implements LAMB (You et al. 2020): Adam's direction, scaled for each parameter by ||p|| / ||direction||. No host
    sync in ``step``.

    ``ampctx.optimizer_ops.lamb`` has the formula. If the norm of all gradients, over all groups, is above
    ``max_grad_norm``, it scales them down first. State of each parameter: ``step``, ``exp_avg``, ``exp_avg_sq``; fp32.

    Args:
        bias_correction, betas, eps, weight_decay: as in Adam.
        amsgrad: not supported.
        adam_w_mode: use decoupled weight decay. False adds weight_decay * p to the gradient.
        grad_averaging: False adds the whole gradient to beta1 * exp_avg.
        max_grad_norm: the bound, a group option. 0 or None: no bound.
        use_nvlamb: scale by the ratio of norms without weight decay, too.
        params, lr, set_grad_none, and shared keywords: see ``FusedOptimizer``.
    """

    _op = "lamb"
    _defaults = ("lr", "bias_correction", "betas", "eps", "weight_decay", "grad_averaging", "max_grad_norm")
    _split_step = layerwise.lamb

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
        **shared: Unpack[SharedOptions],
    ) -> None:
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.use_nvlamb = use_nvlamb
        super().__init__(params, locals())

    def _check_options(self, group: Group) -> None:
        super()._check_options(group)
        if group["max_grad_norm"] is not None:
            group["max_grad_norm"] = check_number("max_grad_norm", group["max_grad_norm"], finite=False)

    def _global_norm(self, works: list[Work], step: Step) -> PerDevice | None:
        if not any(group["max_grad_norm"] for work in works for group in work.groups or [work.group]):
            return None
        # In the order of the parameters, whose numbers differ: the sum is the same however groups share calls.
        rows = {n: (w.is_pending, g) for w in works for n, g in zip(w.numbers, w.lists["grads"], strict=True)}
        grads, pending_grads = ([rows[n][1] for n in sorted(rows) if rows[n][0] is kind] for kind in (False, True))
        norms = [foreach.unscale_l2norm(grads, Unread(), step.inv_scale)] if grads else []
        if pending_grads and step.pending is not None:
            # Their norm is known, unless other optimizers step some of the masters, or there is another scale.
            if len(pending_grads) == len(step.pending.masters) and step.inv_scale == 1.0:
                norms.append(step.pending.norm())
            else:
                inv_scale = foreach.product(step.pending.inv_scale, step.inv_scale)
                norms.append(foreach.unscale_l2norm(pending_grads, Unread(), inv_scale))
        total = foreach.joined_norm(norms)
        # The ops accept an fp64 norm only on the CPU.
        return PerDevice(total if all(work.device.type == "cpu" for work in works) else total.float())
