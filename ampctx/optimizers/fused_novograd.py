"""NovoGrad, put together of norms and list ops."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from ampctx._errors import AmpTypeError, AmpValueError
from ampctx._saved import plain
from ampctx.kernels.foreach import PerDevice
from ampctx.optimizers import layerwise
from ampctx.optimizers._base import FusedOptimizer, SharedOptions
from ampctx.optimizers._checkpoint import SavedGroup
from ampctx.optimizers._options import Group
from ampctx.optimizers._work import Work
from ampctx.weights.step import Step

_NORM_TYPES = (2, 0)


class FusedNovoGrad(FusedOptimizer):
    """Implements NovoGrad (Ginsburg et al. 2019): the second moment is the running norm of a parameter's gradient. No
    host sync in ``step``.

    n = sqrt(beta2 n^2 + (1 - beta2) ||g||^2), or beta2 n + (1 - beta2) max|g|; at the first step, n is the norm itself.
    With d = n / sqrt(c2) + eps and c = 1 - beta^step: m = beta1 m + (1 - beta1) g, p -= lr (m / c1 / d + weight_decay
    p). State of each parameter, fp32: ``step``, ``exp_avg`` (m; fp64 for an fp64 parameter) and the 0-d ``exp_avg_sq``,
    which is n, a norm and not its square.

    Args:
        bias_correction, betas, eps: as in Adam.
        weight_decay: decoupled, unless ``reg_inside_moment``.
        amsgrad: not supported.
        reg_inside_moment: average g / d + weight_decay p in ``exp_avg``; then p -= lr m / c1.
        grad_averaging: False adds the whole gradient to beta1 * exp_avg.
        norm_type: 2 for the L2 norm, 0 for the largest magnitude.
        init_zero: start the running norm at 0 instead of the first norm.
        params, lr, set_grad_none, and shared keywords: see ``FusedOptimizer``.
    """

    _op = "novograd"
    _defaults = ("lr", "bias_correction", "betas", "eps", "weight_decay", "grad_averaging", "norm_type", "init_zero")
    _split_step = layerwise.novograd

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
        **shared: Unpack[SharedOptions],
    ) -> None:
        self.moment_mode = 0 if reg_inside_moment else 1
        super().__init__(params, locals())

    def _check_options(self, group: Group) -> None:
        super()._check_options(group)
        norm_type = plain(group["norm_type"])
        if not isinstance(norm_type, (int, float)) or isinstance(norm_type, bool) or norm_type not in _NORM_TYPES:
            raise AmpValueError(f"norm_type is {norm_type!r}, expected 2 (L2) or 0 (largest magnitude)")
        group["norm_type"] = int(norm_type)

    def _launch(self, work: Work, step: Step, norm: PerDevice | None) -> None:
        call = layerwise.StepLayers(self, work, step)
        layerwise.novograd_step(call, call.norms(call.inv_scale, layerwise.norm_order(work.group)))

    def _adapt_checkpoint(self, group: SavedGroup) -> None:
        """Splits apex's norms, two tensors a group: for its fp16 parameters and for the others. If one is empty (with
        amp's masters), the other has all norms in order, for any dtypes now."""
        super()._adapt_checkpoint(group)
        norms = group.saved.pop("exp_avg_sq", None)
        if norms is None:
            return
        if not isinstance(norms, (list, tuple)) or len(norms) != 2 or not all(isinstance(t, Tensor) for t in norms):
            raise AmpTypeError(f"exp_avg_sq of a param group is {norms!r:.80}, expected a list of 2 tensors")
        of_dtype: dict[bool, list[dict[str, Any]]] = defaultdict(list)
        alone = next((i == 0 for i, tensor in enumerate(norms) if tensor.numel() == len(group.states)), None)
        for p, _, state in group.states:
            of_dtype[p.dtype == torch.float16 if alone is None else alone].append(state)
        for tensor, states in zip(norms, (of_dtype[True], of_dtype[False]), strict=True):
            if tensor.numel() != len(states):
                raise AmpValueError(
                    f"exp_avg_sq of a param group holds {tensor.numel()} norms for {len(states)} parameters. Load it "
                    "into parameters of the dtypes that it was saved with."
                )
            for state, norm in zip(states, tensor.reshape(-1).unbind(), strict=True):
                state["exp_avg_sq"] = norm
