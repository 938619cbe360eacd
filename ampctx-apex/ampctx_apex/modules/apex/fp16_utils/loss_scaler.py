"""apex's loss scalers from before apex.amp: plain numbers that ``update_scale`` changes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ampctx import AmpValueError, foreach
from ampctx.foreach import FoundInf
from ampctx.spi import LossScale, check_count, check_real, check_scale, strided_grad


class LossScaler:
    """A static scale, ``cur_scale``, which never looks at gradients."""

    def __init__(self, scale: float = 1) -> None:
        self.cur_scale = scale

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        return False

    @staticmethod
    def _has_inf_or_nan(x: Tensor) -> bool:
        return False

    def update_scale(self, overflow: bool) -> None:
        """Nothing: the scale is static."""

    @property
    def loss_scale(self) -> float:
        return self.cur_scale

    def scale_gradient(self, module: Any, grad_in: tuple, grad_out: tuple) -> tuple:
        """For a backward hook of a module: the gradients times the scale."""
        return tuple(None if g is None else self.loss_scale * g for g in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        (loss * self.loss_scale).backward(retain_graph=retain_graph)


class DynamicLossScaler(LossScaler):
    """A scale that falls by ``scale_factor`` with an overflow, not below 1, and grows by it after ``scale_window``
    updates without one.

    The rule is that of amp's loss scale. ``cur_scale``, ``cur_iter``, ``last_overflow_iter``,
    ``scale_factor`` and ``scale_window`` may be assigned at any time.
    """

    def __init__(self, init_scale: float = 2**32, scale_factor: float = 2.0, scale_window: int = 1000) -> None:
        if not check_real("scale_factor", scale_factor) > 1.0:
            raise AmpValueError(f"scale_factor is {scale_factor}, expected a number > 1")
        check_scale("init_scale", init_scale)
        check_count("scale_window", scale_window, 1)
        super().__init__(init_scale)
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = scale_factor
        self.scale_window = scale_window

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Whether a gradient of ``params`` holds inf or nan. One host sync for all of them."""
        return _any_non_finite([g for p in params if (g := strided_grad(p)) is not None])

    @staticmethod
    def _has_inf_or_nan(x: Tensor) -> bool:
        return _any_non_finite([x])

    def update_scale(self, overflow: bool) -> None:
        rule = LossScale(
            self.cur_scale,
            dynamic=True,
            growth_factor=self.scale_factor,
            backoff_factor=1.0 / self.scale_factor,
            growth_interval=self.scale_window,
            min_scale=min(1.0, self.cur_scale),
        )
        rule.set_unskipped((self.cur_iter - self.last_overflow_iter - 1) % self.scale_window)
        rule.update(torch.tensor(float(bool(overflow)), dtype=torch.float32, device="cpu"))
        self.cur_scale = rule.value()
        if overflow:
            self.last_overflow_iter = self.cur_iter
        self.cur_iter += 1


def _any_non_finite(tensors: list[Tensor]) -> bool:
    if not tensors:
        return False
    found_inf = FoundInf()
    foreach.l2norm(tensors, found_inf)
    return bool(found_inf.joined(tensors[0].device).item())


# What checkpoints of FP16_Optimizer hold: torch.load takes them without weights_only=False.
torch.serialization.add_safe_globals([LossScaler, DynamicLossScaler])
