"""amp_C: apex's multi-tensor functions ``(chunk_size, noop_flag, tensor_lists, *numbers)``, over ampctx's ops.

Args:
    chunk_size: ignored; it tuned apex's kernels.
    noop_flag: an int32 or fp32 tensor of one or more elements. Its first element becomes 1 if an input that a function
        checks holds inf or nan. It may be on another device than the lists; if one of the two is the CPU, that is a
        host sync.
    tensor_lists: lists of fp32, fp16, bf16 and fp64 tensors on one device, in any mix of dtypes and layouts, or empty.
        Tensors at one index have the same number of elements. Elements correspond by index if the shapes are equal,
        else in row-major order.
    numbers: numbers, or one-element tensors.

Raises:
    AmpTypeError, AmpValueError: an invalid flag, list or number, with the names of function and argument, and index.

Names that are not here come from the compiled amp_C of an apex that is installed as well.

Arithmetic is fp32 (fp64 where an fp64 tensor takes part) and state may be of any floating type. ``lr``, ``scale``,
``inv_scale``, ``step`` and norms may be tensors, which the host does not read; tensors in the place of other numbers
are read. The formulas are in ``ampctx.optimizer_ops`` and ``FusedNovoGrad``. None of the functions is a host sync.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from ampctx_apex.arguments import check_tensor
from ampctx_apex.multi_tensor import Call, Number, foreach_factor, found_in, multi_tensor, run_op
from torch import Tensor

from ampctx import AmpValueError, foreach
from ampctx.spi import Layers, adapt, compute_dtype, multiply

# --- scaling and norms ------------------------------------------------------------------------------------------------


@multi_tensor("src dst", "scale")
def multi_tensor_scale(call: Call, scale: Number) -> None:
    """``dst[i] = src[i] * scale`` for ``[src, dst]``; ``dst`` may be ``src``. The flag checks ``src``."""
    with call.flag() as flag:
        foreach.scale(call["src"], call["dst"], found_in(flag), foreach_factor(scale))


@multi_tensor("x y out", "a b arg_to_check")
def multi_tensor_axpby(call: Call, a: Number, b: Number, arg_to_check: int) -> None:
    """``out[i] = a * x[i] + b * y[i]`` for ``[x, y, out]``. The flag checks x (0), y (1) or both (-1).

    ``out`` may be ``x`` or ``y``.
    """
    with call.flag() as flag:
        of_x, of_y = foreach_factor(a), foreach_factor(b)
        foreach.axpby(call["x"], call["y"], call["out"], found_in(flag), of_x, of_y, arg_to_check)


def _norms(call: Call, inv_scale: Number, per_tensor: bool) -> tuple[Tensor, Tensor]:
    if not call.length:
        total = torch.zeros(1, dtype=torch.float32, device=call.device)
        return total, total.new_empty(0)
    with call.flag() as flag:
        if per_tensor:
            total, each = foreach.unscale_l2norms(call["tensors"], found_in(flag), foreach_factor(inv_scale))
        else:
            total = foreach.unscale_l2norm(call["tensors"], found_in(flag), foreach_factor(inv_scale))
            each = total.new_empty(0)
    return total.reshape(1), each


@multi_tensor("tensors", "per_tensor=False")
def multi_tensor_l2norm(call: Call, per_tensor: bool) -> tuple[Tensor, Tensor]:
    """``(norm [1], norms of each tensor [n] or empty [0])`` for ``[tensors]``.

    Both are fp32, or fp64 for fp64 tensors. The flag reports inf and nan elements, not an overflow of the sum of
    squares.
    """
    return _norms(call, 1.0, per_tensor)


@multi_tensor("tensors", "per_tensor=False")
def multi_tensor_l2norm_mp(call: Call, per_tensor: bool) -> tuple[Tensor, Tensor]:
    """``multi_tensor_l2norm``. Returns the norm even if the flag is set; apex's result is undefined then."""
    return _norms(call, 1.0, per_tensor)


@multi_tensor("tensors", "inv_scale per_tensor=False", inv_scale=Call.factor)
def multi_tensor_unscale_l2norm(call: Call, inv_scale: Number, per_tensor: bool) -> tuple[Tensor, Tensor]:
    """``multi_tensor_l2norm`` of ``t * inv_scale``, without changing the tensors."""
    return _norms(call, inv_scale, per_tensor)


# --- steps element by element, and NovoGrad's -------------------------------------------------------------------------

# List of a function -> that of the ops.
_AS_OP = {"momenta": "momentum_buffers", "copies": "extras"}


@multi_tensor(
    "grads params momenta copies", "wd momentum dampening lr nesterov first_run wd_after_momentum scale", optional=1
)
def multi_tensor_sgd(call: Call, wd: float, scale: Any, first_run: bool, **options: Any) -> None:
    """SGD for ``[grads, params, momenta]``, or with a fourth list that becomes a copy of the params.

    Gradients are multiplied by ``scale`` as they are read. ``first_run`` sets the momenta to the gradients; without
    momentum they stay as they are. Does nothing where the flag is not 0.
    """
    unused = {"momenta"} if options["momentum"] == 0 else set()
    lists = {_AS_OP.get(name, name): tensors for name, tensors in call.lists.items() if name not in unused}
    with call.flag() as flag:
        run_op("sgd", call, lists, 0 if first_run else 1, flag, weight_decay=wd, inv_scale=scale, **options)


_ADAM = "grads params exp_avgs exp_avg_sqs"
_ADAM_ARGUMENTS = "lr beta1 beta2 eps step mode bias_correction weight_decay"


@multi_tensor(_ADAM, _ADAM_ARGUMENTS)
def multi_tensor_adam(call: Call, step: Tensor, mode: int, **options: Any) -> None:
    """Adam for ``[grads, params, exp_avgs, exp_avg_sqs]``; ``step`` counts this one.

    ``mode`` 0: weight decay is added to the gradients; 1: it is decoupled. The flag has no part in it.
    """
    run_op("adam", call, call.lists, step - 1, call.no_flag(), inv_scale=1.0, adam_w_mode=mode == 1, **options)


@multi_tensor(_ADAM, f"{_ADAM_ARGUMENTS} inv_scale")
def multi_tensor_adam_capturable(call: Call, **options: Any) -> None:
    """``multi_tensor_adam`` on gradients times ``inv_scale``, which are left multiplied.

    Does nothing where the flag is not 0.
    """
    _adam_capturable(call, call.lists, **options)


@multi_tensor(f"{_ADAM} masters", f"{_ADAM_ARGUMENTS} inv_scale")
def multi_tensor_adam_capturable_master(call: Call, **options: Any) -> None:
    """``multi_tensor_adam_capturable`` with a fifth list of masters: it steps these, and params become their copies."""
    lists = dict(call.lists)
    lists["extras"], lists["params"] = lists["params"], lists.pop("masters")
    _adam_capturable(call, lists, **options)


def _adam_capturable(call: Call, lists: dict[str, list[Tensor]], step: Tensor, mode: int, **options: Any) -> None:
    with call.flag() as flag:
        run_op("adam", call, lists, step - 1, flag, unscale_grads=True, adam_w_mode=mode == 1, **options)


@multi_tensor("grads params sums", "lr eps mode weight_decay")
def multi_tensor_adagrad(call: Call, mode: int, **options: Any) -> None:
    """Adagrad for ``[grads, params, sums]``; ``mode`` as in ``multi_tensor_adam``. The flag has no part in it."""
    run_op("adagrad", call, call.lists, 0, call.no_flag(), inv_scale=1.0, adagrad_w_mode=mode == 1, **options)


@multi_tensor(
    "grads params exp_avgs",
    "grad_norms lr beta1 beta2 eps step bias_correction weight_decay grad_averaging moment_mode norm_type",
)
def multi_tensor_novograd(
    call: Call,
    grad_norms: Tensor,
    lr: Any,
    step: Tensor,
    weight_decay: float,
    moment_mode: int,
    norm_type: int,
    **options: Any,
) -> None:
    """NovoGrad for ``[grads, params, exp_avgs]`` and the running norms ``grad_norms`` (fp32, one for each index).

    The norms are blended with those of the gradients (L2 for ``norm_type`` 2, largest element for 0) before they are
    used. ``moment_mode`` 0: weight decay goes into the moment; 1: it does not. The flag becomes 1 where a gradient
    holds inf or nan, and keeps nothing from happening.
    """
    # The caller put the first norm into grad_norms, or 0.
    options |= {"reg_inside_moment": moment_mode == 0, "inf_norm": norm_type == 0, "init_zero": True}
    with call.flag() as flag:
        foreach.l2norm(call["grads"], found_in(flag))
    if not call.length:
        return
    layers, taken = _layers(call, call.no_flag(), exp_avg_sqs=list(grad_norms.unbind())), (step - 1).repeat(call.length)
    of_grads = layers.norms(1.0, float("inf") if norm_type == 0 else 2.0)
    moves = layers.normalized(1.0, call["params"], of_grads, taken, weight_decay=weight_decay, **options)
    layers.step(moves, lr, weight_decay=0.0 if moment_mode == 0 else weight_decay)


# --- LAMB -------------------------------------------------------------------------------------------------------------
# apex's LAMB leaves its updates behind and steps by them as they are stored, for which ampctx's op has no place.

_LAMB_ARGUMENTS = (
    "lr beta1 beta2 eps step bias_correction weight_decay grad_averaging mode global_grad_norm max_grad_norm use_nvlamb"
)


def _layers(call: Call, found_inf: Tensor, **others: list[Tensor]) -> Layers:
    return Layers({**{_AS_OP.get(name, name): ts for name, ts in call.lists.items()}, **others}, found_inf)


def _each_norm(tensors: Sequence[Tensor], flag: Tensor) -> Tensor:
    return foreach.unscale_l2norms(tensors, found_in(flag), 1.0)[1]


def _clip(norm: Tensor, largest: Tensor) -> Tensor:
    """The factor that brings gradients of this norm down to the largest allowed, 0-d; 1 where that is 0.

    Not left to the op, which takes the latter as a number alone.
    """
    return torch.where((norm > largest) & (largest > 0), largest / norm, torch.ones_like(norm))


def _directions(call: Call, found_inf: Tensor, factor: Tensor, **options: Any) -> list[Tensor]:
    """``Layers.directions``; the moments are rounded to their own type at the end.

    ampctx goes on with moments as they are stored, apex with those of before they were rounded.
    """
    moments = {name: [t.to(compute_dtype(t)) for t in call[name]] for name in ("exp_avgs", "exp_avg_sqs")}
    updates = _layers(call, found_inf, **moments).directions(foreach_factor(factor), call["params"], **options)
    for name, advanced in moments.items():
        for t, new in zip(call[name], advanced, strict=True):
            if new is not t:
                t.copy_(new)
    return updates


def _apply(
    layers: Layers, updates: Sequence[Tensor], of_params: Tensor, of_updates: Tensor, lr: Any, has_ratio: bool
) -> None:
    """``p -= lr * ||p|| / ||u|| * u``, or lr alone without a ratio or where a norm is 0."""
    if has_ratio:
        updates = [t.to(compute_dtype(t), copy=True) for t in updates]
        adapt(updates, of_params, of_updates)
    layers.step(updates, lr)


def _lamb(
    call: Call,
    flag: Tensor,
    skip: Tensor,
    factor: Tensor,
    lr: Any,
    step: Tensor,
    weight_decay: float,
    mode: int,
    use_nvlamb: bool,
    **options: Any,
) -> None:
    """The whole of LAMB. Where ``skip`` is the flag, each part sees what the parts before it met."""
    if not call.length:
        return
    grads, taken = call["grads"], (step - 1).repeat(call.length)
    of_params = _each_norm(call["params"], flag)
    options |= {"weight_decay": weight_decay, "adam_w_mode": mode == 1, "taken": taken}
    for g, update in zip(grads, _directions(call, skip, factor, **options), strict=True):
        g.copy_(torch.where(skip != 0, g, update.to(g.dtype).reshape(g.shape)))
    of_updates = _each_norm(grads, flag)
    _apply(_layers(call, skip), grads, of_params, of_updates, lr, use_nvlamb or weight_decay != 0)


@multi_tensor(_ADAM, f"{_LAMB_ARGUMENTS}=0")
def multi_tensor_lamb(call: Call, global_grad_norm: Tensor, max_grad_norm: Tensor, **options: Any) -> None:
    """LAMB for ``[grads, params, exp_avgs, exp_avg_sqs]``; the gradients become the updates.

    Gradients are first scaled down by ``max_grad_norm / global_grad_norm`` where that is below 1 and the former not 0.
    ``mode`` 0: weight decay is added to the gradients; 1: to the update. The flag becomes 1 where a param or an update
    holds inf or nan, and keeps nothing from happening.
    """
    with call.flag() as flag:
        _lamb(call, flag, call.no_flag(), _clip(global_grad_norm, max_grad_norm), **options)


@multi_tensor(f"{_ADAM} copies", f"{_LAMB_ARGUMENTS} found_inf inv_scale", optional=1)
def multi_tensor_lamb_mp(
    call: Call, global_grad_norm: Tensor, max_grad_norm: Tensor, found_inf: Any, inv_scale: Tensor, **options: Any
) -> None:
    """``multi_tensor_lamb`` on gradients times ``inv_scale``, with a fifth list, if given, that becomes a copy of the
    params. ``global_grad_norm`` and ``max_grad_norm`` are those of the gradients as they are.

    Does nothing where the flag is not 0, nor what is left to do once a param or an update is not finite. ``found_inf``
    has no part in it, as in apex.
    """
    with call.flag() as flag:
        _lamb(call, flag, flag, inv_scale * _clip(global_grad_norm, max_grad_norm), **options)


@multi_tensor(f"{_ADAM} updates", "per_tensor_decay step beta1 beta2 eps global_grad_norm max_global_grad_norm")
def multi_tensor_lamb_stage1_cuda(
    call: Call,
    per_tensor_decay: Tensor,
    step: Tensor,
    global_grad_norm: Tensor,
    max_global_grad_norm: Tensor,
    **options: Any,
) -> None:
    """``updates`` of ``[grads, params, exp_avgs, exp_avg_sqs, updates]``: Adam's direction plus decay times the param.

    ``per_tensor_decay`` is fp32, one number for each index; ``step`` counts the steps before this one. Gradients are
    scaled down as by ``multi_tensor_lamb``. The flag has no part in it.
    """
    options |= {"taken": step.repeat(call.length), "bias_correction": True, "grad_averaging": True}
    factor = _clip(global_grad_norm, max_global_grad_norm)
    updates = _directions(call, call.no_flag(), factor, weight_decay=0.0, adam_w_mode=True, **options)
    decayed = [p.to(compute_dtype(p), copy=True) for p in call["params"]]
    multiply(decayed, per_tensor_decay)
    foreach.axpby(updates, decayed, call["updates"], found_in(call.no_flag()), 1.0, 1.0)


@multi_tensor("params updates", "per_tensor_param_norm per_tensor_update_norm lr weight_decay use_nvlamb=0")
def multi_tensor_lamb_stage2_cuda(
    call: Call,
    per_tensor_param_norm: Tensor,
    per_tensor_update_norm: Tensor,
    lr: Any,
    weight_decay: float,
    use_nvlamb: bool,
) -> None:
    """The step of LAMB for ``[params, updates]`` and their norms (fp32, one for each index).

    ``p -= lr * ||p|| / ||u|| * u``; lr alone where a norm is 0, and without weight decay unless ``use_nvlamb``. The
    flag has no part in it.
    """
    layers, has_ratio = _layers(call, call.no_flag()), use_nvlamb or weight_decay != 0
    _apply(layers, call["updates"], per_tensor_param_norm, per_tensor_update_norm, lr, has_ratio)


# --- the loss scale ---------------------------------------------------------------------------------------------------

_SCALE_STATE = {
    "current_scale": (torch.float32,),
    "growth_tracker": (torch.int32,),
    "hysteresis_tracker": (torch.int32,),
    "found_inf": (torch.float32, torch.int32),
}


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
    """The loss-scale rule of apex, in place on one-element tensors: fp32 scale, int32 trackers. Returns the scale.

    The rule of ``ampctx.ops.update_scale``, but for the floor: below the normal numbers of fp32 the scale is 0.
    """
    state = (current_scale, growth_tracker, hysteresis_tracker, found_inf)
    for (name, dtypes), t in zip(_SCALE_STATE.items(), state, strict=True):
        check_tensor("update_scale_hysteresis", name, t, dtypes=dtypes, beside=("current_scale", current_scale))
        if t.numel() != 1:
            raise AmpValueError(f"update_scale_hysteresis: {name} has {t.numel()} elements, expected 1")
    scale, clean, left, found = (t.reshape(()) for t in state)
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
