"""SGD with momentum, with one op call for each bucket of parameters."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from ampctx._errors import AmpValueError
from ampctx.kernels.tensor_loops import has_values
from ampctx.optimizers._base import FusedOptimizer, SharedOptions
from ampctx.optimizers._checkpoint import SavedGroup
from ampctx.optimizers._options import Group
from ampctx.optimizers._state_types import Forms, State


class FusedSGD(FusedOptimizer):
    """Implements SGD with momentum, as torch.optim.SGD defines it. No host sync in ``step``.

    ``ampctx.optimizer_ops.sgd`` has the formula. State of each parameter, fp32: ``step`` and, with momentum,
    ``momentum_buffer``. ``step`` counts from the first step of the buffer. Checkpoints have the format of
    torch.optim.SGD.

    Args:
        params: parameters or groups, on any mix of devices and dtypes.
        lr: a number >= 0, or a one-element tensor. Required, here or in each group.
        momentum, dampening, weight_decay, nesterov: as in torch.optim.SGD.
        wd_after_momentum: add weight_decay * p after the momentum instead of to the gradient.
        materialize_master_grads: apex's option, kept as an attribute. It has no effect.
        set_grad_none, and the keywords: see ``FusedOptimizer``.
    """

    _op = "sgd"
    _defaults = ("lr", "momentum", "dampening", "weight_decay", "nesterov")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor | None = None,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = True,
        **shared: Unpack[SharedOptions],
    ) -> None:
        self.wd_after_momentum = wd_after_momentum
        self.materialize_master_grads = materialize_master_grads
        super().__init__(params, locals())

    def _check_options(self, group: Group) -> None:
        super()._check_options(group)
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise AmpValueError("Nesterov momentum requires a momentum and zero dampening.")

    def _make_state(self, p: Tensor, state: State, forms: Forms, destination: str) -> None:
        buffers = {key for key in forms.sized.values() if key is not None}
        if not buffers <= state.keys():
            # At a count of 0 the op starts the buffer with the gradient.
            state.pop("step", None)
        elif buffers and "step" not in state:
            # A buffer set by hand has started.
            state["step"] = 1
        super()._make_state(p, state, forms, destination)

    def _adapt_checkpoint(self, group: SavedGroup) -> None:
        super()._adapt_checkpoint(group)
        for _, _, state in group.states:
            # torch and apex do not count steps: an existing buffer has started. If our first step was skipped and torch
            # then started the buffer, the checkpoint has our count of 0.
            buffer = next((value for key, value in state.items() if key.startswith("momentum_buffer")), None)
            if not isinstance(buffer, Tensor) or not has_values(buffer):
                continue
            if "step" not in state or (_is_zero(state["step"]) and buffer.any()):
                state["step"] = 1


def _is_zero(count: Any) -> bool:
    """False for values that are no numbers: the checks of states raise for them."""
    if isinstance(count, Tensor):
        return count.numel() == 1 and has_values(count) and not count.any()
    return isinstance(count, (int, float)) and count == 0
