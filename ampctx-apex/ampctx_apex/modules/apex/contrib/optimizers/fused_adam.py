"""apex.contrib.optimizers.FusedAdam over ``ampctx.optimizers.FusedAdam``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ampctx import AmpNotImplementedError, optimizers
from ampctx.foreach import PerDevice
from ampctx.spi import Group, Scaling, Work, check_option

from ._old_step import old_step


class FusedAdam(optimizers.FusedAdam):
    """Adam with a decoupled decay, as it was before apex.optimizers:
    ``p -= lr * sqrt(c2) / c1 * (m / (sqrt(v) + eps) + weight_decay * p)``.

    ``c1`` and ``c2`` are 1 - beta**step, 1 without ``bias_correction``. All parameters of a group that have gradients
    take the ``step`` of the first of them.

    Args:
        eps_inside_sqrt: not supported.
        max_grad_norm: of each group; gradients are scaled down to this norm. 0: they are not.
        use_mt: nothing, all parameters go into one call.
        amp_scale_adjustment: 1 alone.
        Others as for ``ampctx.optimizers.FusedAdam``.
    """

    # step runs the base's.
    _step_supports_amp_scaling = _step_supports_model_params = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        amsgrad: bool = False,
        use_mt: bool = False,
        amp_scale_adjustment: float = 1.0,
    ) -> None:
        if eps_inside_sqrt:
            raise AmpNotImplementedError(
                "apex.contrib.optimizers.FusedAdam(eps_inside_sqrt=True) is not supported by ampctx: leave it out. "
                "eps is then added to the root"
            )
        if amp_scale_adjustment != 1.0:
            raise AmpNotImplementedError(
                "apex.contrib.optimizers.FusedAdam(amp_scale_adjustment=...) is not supported by ampctx: pass the "
                "product as scale to step()"
            )
        # Before the base class, which checks the options with it.
        self._max_grad_norm = max_grad_norm
        super().__init__(
            params,
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
        )

    def _check_options(self, group: Group) -> None:
        super()._check_options(group)
        norm = group.get("max_grad_norm", self._max_grad_norm)
        group["max_grad_norm"] = check_option("max_grad_norm", norm, finite=False)

    def _op_options(self, group: Group) -> dict[str, Any]:
        # Uncorrected, the op has the old formula, with an lr that holds both corrections.
        return {**super()._op_options(group), "bias_correction": False}

    def _launch(self, work: Work, scaling: Scaling, norm: PerDevice | None) -> None:
        group = work.group
        if group["bias_correction"]:
            beta1, beta2 = group["betas"]
            step = self.state[work.members[0]]["step"].double() + 1
            rate = group["lr"] * (1 - beta2**step).sqrt() / (1 - beta1**step)
            work = work._replace(group={**group, "lr": rate})
        super()._launch(work, scaling, norm)

    def step(  # type: ignore[override]
        self,
        closure: Callable[[], Any] | None = None,
        grads: Any = None,
        output_params: Any = None,
        scale: float = 1.0,
        grad_norms: Sequence[Any] | None = None,
    ) -> Any:
        """See ``_old_step.old_step``."""
        return old_step(self, lambda: self._step(None), closure, grads, output_params, scale, grad_norms)


__all__ = ["FusedAdam"]
