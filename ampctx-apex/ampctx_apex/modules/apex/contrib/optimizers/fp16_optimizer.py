"""apex.contrib.optimizers.FP16_Optimizer: the wrapper of the old fused optimizers, over that of fp16_utils."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ampctx import AmpNotImplementedError, foreach
from ampctx.foreach import FoundInf
from ampctx.spi import check_scale

from ...amp._stash import Groups
from ...amp.scaler import delegated
from ...fp16_utils import fp16_optimizer
from ...fp16_utils.loss_scaler import DynamicLossScaler, LossScaler


class _StaticScaler(LossScaler):
    """A static scale that counts its updates."""

    cur_iter = 0

    def update_scale(self, overflow: bool) -> None:
        self.cur_iter += 1


class FP16_Optimizer(fp16_optimizer.FP16_Optimizer):
    """Steps fp32 masters of an optimizer's 16-bit parameters, and scales the loss.

    ``backward`` leaves scaled gradients with the model; ``step`` unscales them and skips on overflow, under a static
    scale, too. A dynamic scale starts at 2**16 and grows after 1000 steps without overflow.

    Args:
        dynamic_loss_args: init_scale, scale_factor and scale_window of ``apex.fp16_utils.DynamicLossScaler``.
        Others as for ``apex.fp16_utils.FP16_Optimizer``.
    """

    __module__ = __package__

    cur_scale = delegated("loss_scaler", "cur_scale")
    cur_iter = delegated("loss_scaler", "cur_iter")
    last_overflow_iter = delegated("loss_scaler", "last_overflow_iter")
    scale_factor = delegated("loss_scaler", "scale_factor")
    scale_window = delegated("loss_scaler", "scale_window")

    # Without a getter: what apex's class has not, though that of fp16_utils has. Programs ask for it with hasattr.
    update_master_grads: Any = property()
    clip_master_grads: Any = property()

    def __getattr__(self, name: str) -> Any:
        if name in ("update_master_grads", "clip_master_grads"):
            raise AttributeError(
                f"apex.contrib.optimizers.FP16_Optimizer has no {name}, as it unscales in step(): give FusedAdam "
                "max_grad_norm, or use apex.fp16_utils.FP16_Optimizer"
            )
        return super().__getattr__(name)

    def _new_scaler(self, static: float, dynamic_arguments: Mapping[str, Any] | None) -> Any:
        if not self.dynamic_loss_scale:
            return _StaticScaler(check_scale("static_loss_scale", static))
        return DynamicLossScaler(**{"init_scale": 2.0**16, **(dynamic_arguments or {})})

    @property
    def loss_scale(self) -> float:
        return self.cur_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.cur_scale = check_scale("loss_scale", value)

    @property
    def fp16_groups(self) -> Groups:
        """All parameters of the model by param group, with and without masters."""
        return [[self._masters.model_of.get(p, p) for p in group] for group in self._groups()]

    @property
    def fp32_groups(self) -> Groups:
        """The stepped parameters, in the same order."""
        return self._groups()

    def zero_grad(self, set_grads_to_None: bool = True, *, set_to_none: bool | None = None) -> None:
        super().zero_grad(set_grads_to_None, set_to_none=set_to_none)

    def backward(self, loss: Tensor) -> None:  # type: ignore[override]
        """``backward()`` of the scaled loss, in fp32."""
        super().backward(loss, update_master_grads=False)

    def _unscale(self, grads: list[Tensor], into: list[Tensor]) -> bool:
        found_inf = FoundInf()
        foreach.scale(grads, into, found_inf, 1.0 / self.cur_scale)
        overflow = bool(grads) and bool(found_inf.joined(grads[0].device).item())
        self.loss_scaler.update_scale(overflow)
        return overflow

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Unscales, and steps unless a gradient is inf or nan. One host sync."""
        if closure is not None:
            raise AmpNotImplementedError(
                "apex.contrib.optimizers.FP16_Optimizer.step() takes no closure: use apex.fp16_utils.FP16_Optimizer"
            )
        super().update_master_grads()
        result = super().step()
        self._masters.drop_grads()
        return result

    def state_dict(self) -> dict[str, Any]:
        """In apex's format: the scale's numbers, and "fp32_groups", the stepped parameters by group."""
        result: dict[str, Any] = {"dynamic_loss_scale": self.dynamic_loss_scale}
        for name in self._scale_names(self.dynamic_loss_scale):
            result[name] = getattr(self, name)
        result["optimizer_state_dict"] = self.optimizer.state_dict()
        result["fp32_groups"] = [[p.detach() for p in group] for group in self.fp32_groups]
        return result

    @staticmethod
    def _scale_names(dynamic: bool) -> list[str]:
        return ["cur_scale", "cur_iter", *(["last_overflow_iter", "scale_factor", "scale_window"] if dynamic else [])]

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes what ``state_dict`` gave, here or in apex, or "fp32_groups_flat", for each group one 1-D tensor.

        Raises what ``apex.fp16_utils.FP16_Optimizer.load_state_dict`` does.
        """
        flat = isinstance(state_dict, Mapping) and "fp32_groups_flat" in state_dict
        masters = "fp32_groups_flat" if flat else "fp32_groups"
        for key in ("dynamic_loss_scale", "cur_scale", "optimizer_state_dict", masters):
            fp16_optimizer.required(state_dict, key)
        dynamic = bool(state_dict["dynamic_loss_scale"])
        scaler: LossScaler = DynamicLossScaler() if dynamic else _StaticScaler()
        for name in self._scale_names(dynamic):
            fp16_optimizer.required(state_dict, name)
            setattr(scaler, name, state_dict[name])
        check_scale("state_dict['cur_scale']", scaler.cur_scale)
        self._load_masters(state_dict, masters, self.fp32_groups)
        self.loss_scaler, self.dynamic_loss_scale, self.overflow = scaler, dynamic, False
