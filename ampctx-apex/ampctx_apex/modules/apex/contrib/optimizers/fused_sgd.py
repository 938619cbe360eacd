"""apex.contrib.optimizers.FusedSGD over ``ampctx.optimizers.FusedSGD``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ampctx import optimizers

from ._old_step import old_step


class FusedSGD(optimizers.FusedSGD):
    """SGD whose ``step`` takes the old arguments; without them it uses ``.grad``."""

    # step runs the base's.
    _step_supports_amp_scaling = _step_supports_model_params = True

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: Any = None,
        output_params: Any = None,
        scale: float = 1.0,
        grad_norms: Sequence[Any] | None = None,
    ) -> Any:
        """See ``_old_step.old_step``."""
        loss = old_step(self, lambda: self._step(None), closure, grads, output_params, scale, grad_norms)
        self.most_recent_scale = 1.0
        self.scale_set_by_backward = False
        return loss


__all__ = ["FusedSGD"]
