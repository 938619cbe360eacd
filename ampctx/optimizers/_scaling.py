"""What torch.amp, or ampctx, leaves on an optimizer around its step, as the ops take it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampctx._errors import AmpTypeError
from ampctx.kernels.foreach import Factor, PerDevice, move, product
from ampctx.masters.lazy_grads import ModelGrads
from ampctx.optimizers._options import check_one_element


class Scaling(NamedTuple):
    """What one step finds.

    found_inf: one element; where it is not 0, the op leaves everything as it is. None: nobody looked.
    inv_scale: what the gradients in ``.grad`` are to be multiplied by.
    models: fp32 master to the 16-bit weight that is written with it.
    pending: 16-bit gradients that stand for those of masters, with a factor of their own.
    """

    found_inf: PerDevice | None = None
    inv_scale: Factor = 1.0
    models: Mapping[Tensor, Tensor] = {}
    pending: ModelGrads | None = None


def scaling_of(optimizer: Any, grad_factor: Factor) -> Scaling:
    """Reads ``found_inf``, ``grad_scale``, ``model_params`` and ``model_grads``, which exist around a step only."""
    return Scaling(
        taken_found_inf(optimizer),
        product(taken_inv_scale(optimizer), grad_factor),
        getattr(optimizer, "model_params", None) or {},
        getattr(optimizer, "model_grads", None),
    )


def without_amp(optimizer: Any) -> dict[str, Any]:
    """The attributes of an optimizer that a copy or a pickle takes along.

    Methods that an LR scheduler or amp replaced on the instance stay behind, and so does what amp has put on it and
    marked with an attribute ``of_amp``: they lead to the original.
    """
    return {
        name: value
        for name, value in vars(optimizer).items()
        if not (callable(value) and hasattr(type(optimizer), name)) and not getattr(value, "of_amp", False)
    }


def on_device(value: float | Tensor, device: torch.device) -> float | Tensor:
    """A factor as an op on ``device`` takes it: a number, or a tensor on the CPU or on ``device``. No host sync."""
    if not isinstance(value, Tensor):
        return value
    if value.device.type == "cpu":
        return value if value.dtype in (torch.float32, torch.float64) else value.double()
    return move(value.float(), device)


def taken_inv_scale(optimizer: Any) -> Factor:
    """What gradients are to be multiplied by: 1 / ``optimizer.grad_scale``, 1 without one. No host sync."""
    scale = getattr(optimizer, "grad_scale", None)
    if scale is None:
        return 1.0
    if not isinstance(scale, Tensor):
        return 1.0 / scale
    check_one_element("grad_scale", scale)
    return PerDevice(scale.float().reciprocal())


def taken_found_inf(optimizer: Any) -> PerDevice | None:
    """``optimizer.found_inf`` in a type that the ops take, None without one. No host sync."""
    flag = getattr(optimizer, "found_inf", None)
    if flag is None:
        return None
    if not isinstance(flag, Tensor):
        flag = torch.tensor(float(flag))
    check_one_element("found_inf", flag)
    return PerDevice(flag if flag.dtype in (torch.float32, torch.int32) else (flag != 0).to(torch.int32))


def split_grad_scaler(optimizer: str, kwargs: dict[str, Any]) -> Any:
    """The GradScaler that apex's code gives to ``step``. It is not a named parameter: torch's GradScaler would pass
    itself then, and warn."""
    scaler = kwargs.pop("grad_scaler", None)
    if kwargs:
        raise AmpTypeError(f"{optimizer}.step() got an unexpected keyword argument {next(iter(kwargs))!r}")
    return scaler
