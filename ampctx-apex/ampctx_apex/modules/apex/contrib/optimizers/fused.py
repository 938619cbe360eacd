"""apex.contrib.optimizers.FusedAdam and FusedSGD over ``ampctx.optimizers``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ampctx import AmpNotImplementedError, AmpTypeError, AmpValueError, foreach, optimizers
from ampctx.foreach import Factor, FoundInf, PerDevice
from ampctx.spi import FusedOptimizer, Group, Step, Work, check_option, check_scale

Lists = list[list[Tensor | None]]


def _by_group(name: str, given: Any, groups: list[dict[str, Any]]) -> Lists:
    """A list for each param group, as long as its params: of None where nothing is given. One flat list of tensors, or
    an iterator, is that of a single group."""
    if given is None:
        return [[None] * len(group["params"]) for group in groups]
    if not isinstance(given, Iterable):
        raise AmpTypeError(f"{name} must be a list of tensors, or of lists of tensors, got {type(given).__name__}")
    given = list(given)
    lists = [list(part) for part in given] if given and isinstance(given[0], (list, tuple)) else [given]
    if [len(part) for part in lists] != [len(group["params"]) for group in groups]:
        raise AmpValueError(
            f"{name} has {[len(part) for part in lists]} tensors by group, the optimizer has "
            f"{[len(group['params']) for group in groups]} parameters"
        )
    for part in lists:
        for t in part:
            if t is not None and not isinstance(t, Tensor):
                raise AmpTypeError(f"{name} must hold tensors or None, got {type(t).__name__}")
    return lists


def _factor(scale: float, most: float, norm: Any, grads: list[Tensor]) -> Factor:
    """The factor for gradients: 1 / scale, smaller if their norm exceeds ``most`` (0: no bound)."""
    if not most or not grads:
        return 1.0 / scale
    # A norm that is given is that of the scaled gradients, too.
    total = foreach.l2norm(grads, FoundInf()) if norm is None else torch.as_tensor(norm).reshape(()).float()
    excess = torch.clamp((total / scale + 1e-6) / most, min=1.0)
    return PerDevice((excess * scale).reciprocal())


class _OldStep:
    """The ``step`` of before apex.optimizers, whose wrapper held the gradients."""

    @torch.no_grad()
    def step(
        self: Any,
        closure: Callable[[], Any] | None = None,
        grads: Any = None,
        output_params: Any = None,
        scale: float = 1.0,
        grad_norms: Sequence[Any] | None = None,
        *,
        given: Any = None,
    ) -> Any:
        """One step, on gradients from elsewhere.

        Args:
            closure: evaluated first, with gradients enabled.
            grads: in place of ``.grad``, of any floating dtype; None in it leaves that parameter's ``.grad``.
            output_params: what the new values are copied to, rounded.
            scale: gradients are divided by it.
            grad_norms: for each group the L2 norm of its gradients as they are given, against its ``max_grad_norm``;
                computed without it.
            given: what amp gives a step.

        Returns:
            What the closure returned, else None. ``.grad`` is as before.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.param_groups
        scale = check_scale("scale", scale)
        grads_by_group = _by_group("grads", grads, groups)
        outputs_by_group = _by_group("output_params", output_params, groups)
        norms: Sequence[Any] = [None] * len(groups) if grad_norms is None else grad_norms
        if len(norms) != len(groups):
            raise AmpValueError(f"grad_norms has {len(norms)} norms, the optimizer has {len(groups)} groups")
        before: dict[Tensor, Tensor | None] = {}
        try:
            for group, own, norm in zip(groups, grads_by_group, norms, strict=True):
                pairs = [(p, p.grad if g is None else g) for p, g in zip(group["params"], own, strict=True)]
                found = [(p, g) for p, g in pairs if g is not None]
                sources = [g for _, g in found]
                factor = _factor(scale, group.get("max_grad_norm", 0.0), norm, sources)
                if factor == 1.0 and grads is None:
                    continue
                wide = [torch.empty_like(p) for p, _ in found]
                foreach.scale(sources, wide, FoundInf(), factor)
                for (p, _), unscaled in zip(found, wide, strict=True):
                    before[p], p.grad = p.grad, unscaled
            FusedOptimizer.step(self, given=given)  # without the hooks that torch wraps around the step of each class
        finally:
            for p, grad in before.items():
                p.grad = grad
        for group, outputs in zip(groups, outputs_by_group, strict=True):
            written = [
                (p.detach(), out.detach()) for p, out in zip(group["params"], outputs, strict=True) if out is not None
            ]
            foreach.scale([p for p, _ in written], [out for _, out in written], FoundInf(), 1.0)
        return loss


class FusedAdam(_OldStep, optimizers.FusedAdam):
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

    def _launch(self, work: Work, step: Step, norm: PerDevice | None) -> None:
        group = work.group
        if group["bias_correction"]:
            beta1, beta2 = group["betas"]
            count = self.state[work.members[0]]["step"].double() + 1
            rate = group["lr"] * (1 - beta2**count).sqrt() / (1 - beta1**count)
            work = work._replace(group={**group, "lr": rate})
        super()._launch(work, step, norm)


class FusedSGD(_OldStep, optimizers.FusedSGD):
    """SGD whose ``step`` takes the old arguments; without them it uses ``.grad``."""
