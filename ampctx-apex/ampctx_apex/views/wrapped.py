"""``handle.wrap_optimizer``: apex's interface from before ``amp.initialize``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ampctx import AmpNotImplementedError
from ampctx_apex.views.messages import maybe_print
from ampctx_apex.views.scaler import LossScaler


class OptimWrapper:
    """An optimizer with loss scaling while the handle's casts are on.

    Unlike apex, ``scale_loss`` unscales gradients (apex multiplied the weights) and restores them on an exception.
    Other attributes come from the optimizer.

    Args:
        optimizer: any optimizer.
        amp_handle: an ``AmpHandle`` or ``NoOpHandle``.
        num_loss: number of ``scale_loss`` blocks per step; each has its own dynamic ``LossScaler``.
    """

    __module__ = "apex.amp.opt"

    def __init__(self, optimizer: Any, amp_handle: Any, num_loss: int) -> None:
        self._optimizer = optimizer
        self._amp_handle = amp_handle
        self._num_loss = num_loss
        self._loss_idx = 0
        self._skip_next = [False] * num_loss
        self._loss_scaler = [LossScaler("dynamic") for _ in range(num_loss)]

    @contextmanager
    def scale_loss(self, loss: Tensor) -> Iterator[Tensor]:
        """Yields the scaled loss; on exit unscales gradients and adds earlier losses' gradients. A host sync.

        Raises:
            IndexError: more blocks than ``num_loss`` without a step.
        """
        if not self._amp_handle.is_active():
            yield loss
            return
        scaler = self._cur_loss_scaler()
        params = [p for group in self._optimizer.param_groups for p in group["params"]]
        before = {p: p.grad for p in params} if self._loss_idx > 0 else {}
        for p in before:
            p.grad = None
        try:
            yield loss * scaler.loss_scale()
        except BaseException:
            for p, grad in before.items():
                p.grad = grad
            raise
        grads = [p.grad for p in params if p.grad is not None]
        scaler.clear_overflow_state()
        scaler.unscale(grads, grads, None)
        self._skip_next[self._loss_idx] = scaler.update_scale()
        self._loss_idx += 1
        with torch.no_grad():
            for p, grad in before.items():
                if grad is not None:
                    p.grad = grad if p.grad is None else p.grad.add_(grad)

    def _cur_loss_scaler(self) -> LossScaler:
        return self._loss_scaler[self._loss_idx]

    def step(self, closure: Any = None) -> Any:
        """Steps the optimizer with casts off; skips after an overflow.

        Raises:
            AmpNotImplementedError: a closure while casts are on.
        """
        if not self._amp_handle.is_active():
            return self._optimizer.step(closure=closure)
        if closure is not None:
            raise AmpNotImplementedError(
                "OptimWrapper.step takes no closure. Run forward and backward before it, or use amp.initialize."
            )
        self._loss_idx = 0
        skip, self._skip_next = any(self._skip_next), [False] * self._num_loss
        if skip:
            maybe_print("Gradient overflow, skipping update")
            return None
        with self._amp_handle._disable_casts():
            return self._optimizer.step()

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":
            raise AttributeError(name)  # a copy under way
        return getattr(self._optimizer, name)

    def __repr__(self) -> str:
        return f"OptimWrapper({self._optimizer!r})"
