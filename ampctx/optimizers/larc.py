"""LARC, a wrapper for any optimizer: scales each gradient by the norms of the parameter and its gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ampctx._decorators import names_arguments
from ampctx._errors import AmpError, AmpTypeError
from ampctx.kernels import foreach
from ampctx.kernels.foreach import Factor, PerDevice, Unread, move
from ampctx.kernels.grouping import buckets
from ampctx.kernels.ops import factor
from ampctx.kernels.reference import KERNEL_DTYPES, compute_dtype, scalar
from ampctx.kernels.sharding import place_grads, wrote
from ampctx.optimizers import layerwise
from ampctx.optimizers._checkpoint import without_amp
from ampctx.optimizers._guard import Guarded
from ampctx.optimizers._options import Group, check_flag, param_name, refuse_dtype, with_grads
from ampctx.optimizers._work import given_to, on_device
from ampctx.weights.step import declares


class LARC:
    """Wraps an optimizer with LARC (You, Gitman, Ginsburg 2017), like apex.parallel.LARC. No host sync of its own.

    Before each step, if the norms of weight p and gradient g are not 0: g = a (g + weight_decay p), with
    a = trust_coefficient ||p|| / (||g|| + weight_decay ||p|| + eps), or with ``clip`` min(a / lr, 1). The wrapped
    optimizer then steps with a weight decay of 0. In a group with ``maximize``, g = a (g - weight_decay p).

    LARC is not a torch.optim.Optimizer: pass ``larc.optim`` to LR schedulers. GradScaler of torch and ampctx step it
    like the wrapped optimizer. LARC stores the unscaled gradient in the dtype of ``p.grad``, so a 16-bit gradient may
    underflow. With loss scaling keep fp32 parameters, as amp's O1 and O2 do.

    Args:
        optimizer: any optimizer, stored as ``optim``. LARC changes its gradients in place.
        trust_coefficient, eps: of the formula; 0.02 and 1e-8 by default.
        clip: True, the default, keeps the rate at lr or below. False makes it a * lr.

    Raises:
        AmpTypeError: ``optimizer`` is no optimizer.
        AmpError: it has ``skip_norm_above``.
    """

    @names_arguments
    def __init__(self, optimizer: Any, trust_coefficient: float = 0.02, clip: bool = True, eps: float = 1e-8) -> None:
        if not all(hasattr(optimizer, name) for name in ("param_groups", "state", "step")):
            raise AmpTypeError(f"LARC: optimizer must be an optimizer to wrap, got {type(optimizer).__name__}")
        if isinstance(optimizer, Guarded) and optimizer._guard is not None and optimizer._guard.has_limit:
            raise AmpError(
                f"LARC adapts gradients before {type(optimizer).__name__} could compare their norm with "
                "skip_norm_above. Leave that out; skip_nonfinite works."
            )
        # Set around a step by a GradScaler, or by ampctx.amp.
        self.found_inf: Tensor
        self.optim, self.trust_coefficient, self.clip, self.eps = optimizer, trust_coefficient, clip, eps

    def __getstate__(self) -> dict[str, Any]:
        return without_amp(self)

    def __repr__(self) -> str:
        return f"LARC({self.optim!r}, trust_coefficient={self.trust_coefficient}, clip={self.clip}, eps={self.eps})"

    # --- the wrapped optimizer's own ----------------------------------------------------------------------------------

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return declares(self.optim, "_step_supports_amp_scaling")

    @property
    def _has_repeats(self) -> bool:
        return getattr(self.optim, "_has_repeats", False)

    @property
    def state(self) -> Any:
        return self.optim.state

    @property
    def param_groups(self) -> list[Group]:
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, value: list[Group]) -> None:
        self.optim.param_groups = value

    def state_dict(self) -> dict[str, Any]:
        """Returns the state dict of the wrapped optimizer. LARC has no state."""
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optim.load_state_dict(state_dict)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        self.optim.zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: Group) -> None:
        self.optim.add_param_group(param_group)

    # --- the step -----------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Adapts the gradients and steps the wrapped optimizer. No host sync of its own.

        Args:
            closure: passed to the wrapped optimizer. LARC adapts the gradients after each evaluation.

        Returns:
            The result of the wrapped optimizer's ``step``.

        Raises:
            AmpError, AmpValueError: a sparse gradient or a complex parameter, by name. Nothing has changed then.
        """
        with self._for_one_step() as decays:
            if closure is None:
                self._adapt(decays)
                return self.optim.step()

            def adapted() -> Any:
                loss = closure()
                self._adapt(decays)
                return loss

            return self.optim.step(adapted)

    @contextmanager
    def _for_one_step(self) -> Iterator[list[Any]]:
        """Gives the weight decays, which are 0 meanwhile, and restores ``found_inf`` of the wrapped optimizer."""
        groups, attributes = list(self.param_groups), vars(self.optim)
        decays = [group.get("weight_decay", 0) for group in groups]
        former = {name: value for name, value in attributes.items() if name == "found_inf"}
        decaying = [(group, decay) for group, decay in zip(groups, decays, strict=True) if "weight_decay" in group]
        for group, _ in decaying:
            group["weight_decay"] = 0
        try:
            yield decays
        finally:
            for group, decay in decaying:
                group["weight_decay"] = decay
            attributes.pop("found_inf", None)
            attributes.update(former)

    def _gradients(self) -> list[tuple[list[Tensor], list[Tensor]]]:
        """The gradients and parameters of each group, after all checks of a step."""
        groups = self.param_groups
        for group in groups:
            place_grads(group["params"])
            check_flag("maximize", group.get("maximize", False))
        # A parameter that is in a group twice has one gradient.
        found: list[dict[Tensor, Tensor]] = [{} for _ in groups]
        for g, i, p, grad in with_grads("LARC", groups):
            if p.dtype not in KERNEL_DTYPES:
                refuse_dtype("LARC", param_name(groups, g, i), p.dtype)
            if grad._is_zerotensor():  # torch refuses to write it
                grad = p.grad = grad.clone()
            found[g].setdefault(p, grad)
        return [(list(of_group.values()), list(of_group)) for of_group in found]

    @torch.no_grad()
    def _adapt(self, decays: list[Any]) -> None:
        given = given_to(self, None)
        found_inf, inv_scale = given.found_inf, given.inv_scale
        gradients = self._gradients()
        if found_inf is not None:
            self.optim.found_inf = self.found_inf
        norms = layerwise.larc_norms(self.param_groups, gradients, inv_scale)
        for group, decay, (grads, params), along in zip(self.param_groups, decays, gradients, norms, strict=True):
            for device, _, (g, p, *joined) in buckets(grads, params, along=along):
                flag = None if found_inf is None else found_inf.on(device)
                self._adapt_alike(group, decay, (g, p, *joined), flag, inv_scale)
            wrote(grads)

    def _adapt_alike(self, group: Group, decay: float, lists: Any, found_inf: Tensor | None, inv_scale: Factor) -> None:
        """Adapts gradients of one device and dtype. ``lists``: gradients, parameters, and the norms of both where ranks
        have joined them."""
        grads, params, *norms = lists
        dtype, device = compute_dtype(*grads, *params), grads[0].device

        def number(value: Factor | Tensor) -> Tensor:
            return scalar(factor(value.on(device) if isinstance(value, PerDevice) else value), grads[0], dtype)

        if norms:
            of_g, of_p = (move(torch.stack(list(each)).to(dtype), device) for each in norms)
        else:
            measured = ((grads, inv_scale), (params, 1.0))
            of_g, of_p = (foreach.unscale_l2norms(each, Unread(), scale)[1].to(dtype) for each, scale in measured)
        rates = self.trust_coefficient * of_p / (of_g + of_p * decay + self.eps)
        if self.clip:
            rates = (rates / number(on_device(group["lr"], device))).clamp(max=1.0)
        # With a norm of 0 the gradient is only unscaled: one of 0 gets no decay, and parameters of 0 have none.
        rates = torch.where(of_p == 0, 1.0, torch.where(of_g == 0, 0.0, rates))
        decays: Factor = -decay if group.get("maximize", False) else decay
        if found_inf is not None:  # changes nothing where it is set
            skip = found_inf.reshape(()) != 0
            inv_scale = PerDevice(torch.where(skip, 1.0, number(inv_scale)))
            decays = PerDevice(torch.where(skip, 0.0, number(decays)))
            rates = torch.where(skip, 1.0, rates)
        # Rounded to 16 bits once, at the end.
        wide = grads if grads[0].dtype == dtype else [torch.empty_like(g, dtype=dtype) for g in grads]
        foreach.axpby(grads, params, wide, Unread(), inv_scale, decays)
        layerwise.multiply(wide, rates)
        if wide is not grads:
            foreach.scale(wide, grads, Unread(), 1.0)
