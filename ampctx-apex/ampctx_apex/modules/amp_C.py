"""amp_C: apex's multi-tensor functions, over ampctx's ops.

``(chunk_size, noop_flag, tensor_lists, *numbers)``, positional as in apex. ``ampctx.multi_tensor_apply`` tells what
flags and lists may be. Numbers may be one-element tensors. Names that are not here come from the compiled amp_C of an
apex that is installed as well.
"""

from __future__ import annotations

import torch
from ampctx_apex.installed import attribute_of
from ampctx_apex.kernels_layerwise import (
    multi_tensor_lamb,
    multi_tensor_lamb_mp,
    multi_tensor_lamb_stage1_cuda,
    multi_tensor_lamb_stage2_cuda,
    multi_tensor_lars,
)
from ampctx_apex.kernels_optimizers import (
    multi_tensor_adagrad,
    multi_tensor_adam,
    multi_tensor_adam_capturable,
    multi_tensor_adam_capturable_master,
    multi_tensor_novograd,
    multi_tensor_sgd,
)
from torch import Tensor

from ampctx import AmpTypeError, AmpValueError
from ampctx import foreach as _foreach
from ampctx.multi_tensor_apply import (
    multi_tensor_axpby,
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_unscale_l2norm,
)
from ampctx.spi import Call, Number, TensorLists, foreach_factor, found_in, norms


def multi_tensor_l2norm_mp(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, per_tensor: bool | None = False
) -> tuple[Tensor, Tensor]:
    """``multi_tensor_l2norm``. Returns the norm even if the flag is set; apex's result is undefined then."""
    return norms("multi_tensor_l2norm_mp", noop_flag, tensor_lists, 1.0, per_tensor)


@torch.no_grad()
def multi_tensor_l2norm_scale(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    scale: Number,
    per_tensor: bool | None = False,
) -> tuple[Tensor, Tensor]:
    """``multi_tensor_l2norm`` of ``src``, and ``dst[i] = src[i] * scale``, for ``tensor_lists = [src, dst]``.

    ``dst`` may be ``src``: the norm is that of before. No host sync.
    """
    call = Call("multi_tensor_l2norm_scale", noop_flag, tensor_lists, ("src", "dst"))
    factor = foreach_factor(call.factor("scale", scale))
    if not call.length:
        return torch.zeros(1, device=call.device), torch.zeros(0, device=call.device)
    with call.flag() as flag:
        total, each = _foreach.unscale_l2norms(call["src"], found_in(flag), 1.0)
        _foreach.scale(call["src"], call["dst"], found_in(call.no_flag()), factor)
    return total.reshape(1), each if per_tensor else each.new_empty(0)


_SCALE_STATE = {
    "current_scale": (torch.float32,),
    "growth_tracker": (torch.int32,),
    "hysteresis_tracker": (torch.int32,),
    "found_inf": (torch.float32, torch.int32),
}


def _check_scale_state(*tensors: Tensor) -> None:
    for (name, dtypes), t in zip(_SCALE_STATE.items(), tensors, strict=True):
        where = f"update_scale_hysteresis: {name}"
        if not isinstance(t, Tensor):
            raise AmpTypeError(f"{where} must be a tensor, got {type(t).__name__}")
        if t.dtype not in dtypes:
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise AmpTypeError(f"{where} has dtype {t.dtype}, expected {names}")
        if t.numel() != 1:
            raise AmpValueError(f"{where} has {t.numel()} elements, expected 1")
        if t.device != tensors[0].device:
            raise AmpValueError(
                f"{where} is on {t.device}, not on the same device as the first tensor, current_scale on "
                f"{tensors[0].device}"
            )


@torch.no_grad()
def update_scale_hysteresis(
    current_scale: Tensor,
    growth_tracker: Tensor,
    hysteresis_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
) -> Tensor:
    """The loss-scale rule of apex, in place on one-element tensors: fp32 scale, int32 trackers. ``current_scale``.

    With ``found_inf`` > 0 the hysteresis tracker falls by one, below 0 too; the growth tracker restarts, and once the
    former is not above 0 the scale is multiplied by ``backoff_factor``. There is no floor: below the normal numbers of
    fp32 it is 0. Otherwise the hysteresis tracker is refilled, and the growth tracker counts to ``growth_interval``,
    where the scale is multiplied by ``growth_factor``, if that is finite, and it restarts. No host sync.

    ``ampctx.ops.update_scale`` is the same rule with the scale kept above 0.

    Raises:
        AmpTypeError, AmpValueError: for another type, number of elements or device, with the name of the argument.
    """
    _check_scale_state(current_scale, growth_tracker, hysteresis_tracker, found_inf)
    scale, clean, left, found = (t.reshape(()) for t in (current_scale, growth_tracker, hysteresis_tracker, found_inf))
    left = torch.where(found > 0, left - 1, left)
    tolerated = (found > 0) & (left > 0)
    backoff = (found != 0) & ~tolerated
    clean = torch.where(found == 0, clean + 1, torch.zeros_like(clean))
    grow = (found == 0) & (clean == growth_interval)

    grown, smaller = (_flushed((scale.double() * factor).float()) for factor in (growth_factor, backoff_factor))
    grown = torch.where(torch.isfinite(grown), grown, scale)
    new = torch.where(backoff, smaller, torch.where(grow, grown, scale))
    current_scale.copy_(new.reshape(current_scale.shape))
    growth_tracker.copy_(torch.where(grow, torch.zeros_like(clean), clean).reshape(growth_tracker.shape))
    left = torch.where(found <= 0, torch.full_like(left, hysteresis), left)
    hysteresis_tracker.copy_(left.reshape(hysteresis_tracker.shape))
    return current_scale


def _flushed(value: Tensor) -> Tensor:
    """Numbers below the normal ones are 0."""
    return torch.where(value.abs() < torch.finfo(value.dtype).tiny, torch.zeros_like(value), value)


__getattr__ = attribute_of(__name__)

__all__ = [
    "multi_tensor_adagrad",
    "multi_tensor_adam",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_axpby",
    "multi_tensor_l2norm",
    "multi_tensor_l2norm_mp",
    "multi_tensor_l2norm_scale",
    "multi_tensor_lamb",
    "multi_tensor_lamb_mp",
    "multi_tensor_lamb_stage1_cuda",
    "multi_tensor_lamb_stage2_cuda",
    "multi_tensor_lars",
    "multi_tensor_novograd",
    "multi_tensor_scale",
    "multi_tensor_sgd",
    "multi_tensor_unscale_l2norm",
    "update_scale_hysteresis",
]
