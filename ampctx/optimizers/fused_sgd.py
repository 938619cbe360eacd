"""SGD with momentum in one op call for each bucket of parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ampctx._errors import AmpValueError
from ampctx.kernels.foreach import Factor, PerDevice
from ampctx.optimizers._base import FusedOptimizer
from ampctx.optimizers._checkpoint import SavedGroup, is_zero
from ampctx.optimizers._options import Group


class FusedSGD(FusedOptimizer):
    """SGD with momentum, as torch.optim.SGD defines it.

    ``ampctx.optimizer_ops.sgd`` has the formula. State of each parameter: ``step`` and, with momentum,
    ``momentum_buffer``, fp32; ``step`` counts from where the buffer began. Checkpoints are those of torch.optim.SGD.

    Args:
        params: parameters or groups, on any mix of devices and dtypes.
        lr: a number, or a one-element tensor; required, here or in each group.
        momentum, dampening, weight_decay, nesterov: as in torch.optim.SGD.
        wd_after_momentum: add weight_decay * p to what lr multiplies and not to the gradient.
        materialize_master_grads: apex's, kept as an attribute; ampctx.amp decides by itself.
        set_grad_none: whether ``zero_grad()`` makes gradients None, here False by default.
        maximize, write_back, seed, master_weights, capturable: see ``FusedOptimizer``.

    ``most_recent_scale`` divides the gradients of the next step, which sets it to 1 again.
    """

    _op = "sgd"

    def __init__(
        self, params: Any, lr: float | Tensor | None = None, momentum: float = 0.0, dampening: float = 0.0,
        weight_decay: float = 0.0, nesterov: bool = False, wd_after_momentum: bool = False,
        materialize_master_grads: bool = True, set_grad_none: bool = False, *, maximize: bool = False,
        write_back: str = "nearest", seed: int = 0, master_weights: bool | str = False, capturable: bool = False,
    ) -> None:  # fmt: skip
        self.wd_after_momentum = wd_after_momentum
        self.materialize_master_grads = materialize_master_grads
        self.most_recent_scale: float | Tensor = 1.0
        self.scale_set_by_backward = False
        defaults = {
            "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay,
            "nesterov": nesterov,
        }  # fmt: skip
        super().__init__(
            params, defaults, set_grad_none=set_grad_none, maximize=maximize, write_back=write_back, seed=seed,
            master_weights=master_weights, capturable=capturable,
        )  # fmt: skip

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """``FusedOptimizer.step``, on gradients divided by ``most_recent_scale``."""
        loss = self._step(closure)
        self.most_recent_scale = 1.0
        self.scale_set_by_backward = False
        return loss

    def _grad_factor(self) -> Factor:
        scale = self.most_recent_scale
        return PerDevice(scale.float().reciprocal()) if isinstance(scale, Tensor) else 1.0 / scale

    def _check_options(self, group: Group) -> None:
        super()._check_options(group)
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise AmpValueError("Nesterov momentum requires a momentum and zero dampening")

    def _make_state(self, p: Tensor, state: dict[str, Any], needed: Iterable[str]) -> None:
        if "momentum_buffer" in needed and "momentum_buffer" not in state:
            # The op begins a buffer with the gradient where the count is 0.
            state.pop("step", None)
        super()._make_state(p, state, needed)

    def _adapt_checkpoint(self, group: SavedGroup) -> None:
        super()._adapt_checkpoint(group)
        for _, _, state in group.states:
            # torch and apex do not count steps; a buffer that is there has begun. One that torch began after a first
            # step that was skipped here comes back with our count of 0.
            buffer = state.get("momentum_buffer")
            if not isinstance(buffer, torch.Tensor) or buffer.is_meta:
                continue
            begun = "step" not in state or (is_zero(state["step"]) and buffer.any())
            if begun:
                state["step"] = 1
