"""The steps of amp_C whose rate depends on norms of each tensor: LAMB, whole and in two stages, and LARS.

``modules/amp_C.py`` has what all of amp_C's functions share. apex's LAMB leaves its updates behind and steps by them as
they are stored, for which ampctx's op has no place. So it is put together from ops: that of LAMB makes the directions
(a step of length -1 from weights of 0), that of SGD takes the steps. Arithmetic is fp32, or fp64 where an fp64 tensor
takes part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ampctx import foreach
from ampctx.spi import Call, Number, TensorLists, compute_dtype, foreach_factor, found_in
from ampctx_apex.kernels_optimizers import numbers, run_op

_LAMB = ("grads", "params", "exp_avgs", "exp_avg_sqs")


def _keep(t: Tensor, new: Tensor, skip: Tensor | None) -> None:
    """``t`` becomes ``new``, but where ``skip`` is not 0."""
    new = new.to(t.dtype).reshape(t.shape)
    t.copy_(new if skip is None else torch.where(skip != 0, t, new))


def _new(call: Call, fill: Any = torch.empty_like) -> list[Tensor]:
    """New tensors in the layout of the params and the type of arithmetic."""
    dtype = compute_dtype(*(t for tensors in call.lists.values() for t in tensors))
    return [fill(p, dtype=dtype, requires_grad=False) for p in call["params"]]


def _each_norm(tensors: Sequence[Tensor], flag: Tensor) -> Tensor:
    return foreach.unscale_l2norms(tensors, found_in(flag), 1.0)[1]


def _clip(call: Call, global_grad_norm: Number, max_grad_norm: Number) -> Tensor:
    """What brings gradients of this norm down to the largest allowed, 0-d; 1 where that is 0.

    Not left to the op, which takes the latter as a number alone.
    """
    norm, largest = call.tensor("global_grad_norm", global_grad_norm), call.tensor("max_grad_norm", max_grad_norm)
    return torch.where((norm > largest) & (largest > 0), largest / norm, torch.ones_like(norm))


def _step(call: Call, moves: Sequence[Tensor], lr: Any, skip: Tensor | None, **options: Any) -> None:
    """``params -= lr * moves``, and their copies where the call has any."""
    lists = {"grads": moves, "params": call["params"]}
    if "copies" in call.lists:
        lists["extras"] = call["copies"]
    if "momenta" in call.lists:
        lists["momentum_buffers"] = call["momenta"]
    skip = call.no_flag() if skip is None else skip
    plain = {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "wd_after_momentum": False}
    run_op("sgd", call, lists, 2, skip, inv_scale=1.0, lr=lr, **{**plain, **options})


def _times(tensors: Sequence[Tensor], factors: Tensor) -> list[Tensor]:
    """Each tensor times its factor, in the type of arithmetic: no op takes one for each tensor."""
    return [t.to(compute_dtype(t)) * factor for t, factor in zip(tensors, factors.unbind(), strict=True)]


def _directions(
    call: Call, grads: Sequence[Tensor], found_inf: Tensor, factor: Tensor, step: Number, options: dict[str, Any]
) -> list[Tensor]:
    """Adam's direction for each of the gradients times ``factor``, as new tensors in the layout of the params.

    ``exp_avgs`` and ``exp_avg_sqs`` advance. Where ``found_inf`` is not 0 they do not, and the directions are 0.
    """
    updates = _new(call, torch.zeros_like)
    # The op goes on with moments as it stored them, apex with those of before they were rounded to 16 bits.
    moments = {name: [t.to(compute_dtype(t)) for t in call[name]] for name in ("exp_avgs", "exp_avg_sqs")}
    none: dict[str, Any] = {"global_grad_norm": 0.0, "max_grad_norm": 0.0, "weight_decay": 0.0, "use_nvlamb": False}
    lists = {"grads": grads, "params": updates, **moments}
    run_op("lamb", call, lists, step, found_inf, inv_scale=factor, lr=-1.0, adam_w_mode=True, **none, **options)
    for name, advanced in moments.items():
        for t, new in zip(call[name], advanced, strict=True):
            if new is not t:
                t.copy_(new)
    return updates


def _apply(
    call: Call,
    updates: Sequence[Tensor],
    param_norms: Tensor,
    update_norms: Tensor,
    lr: Number,
    adapt: bool,
    skip: Tensor | None = None,
) -> None:
    """``p -= lr * ||p|| / ||u|| * u``, or lr alone in place of the ratio where a norm is 0 or not to ``adapt``."""
    if adapt:
        ratios, has_ratio = param_norms / update_norms, (param_norms != 0) & (update_norms != 0)
        updates = _times(updates, torch.where(has_ratio, ratios, torch.ones_like(ratios)))
    _step(call, updates, call.factor("lr", lr), skip)


def _lamb(
    call: Call,
    flag: Tensor,
    skip: Tensor | None,
    factor: Tensor,
    lr: Number,
    step: Number,
    mode: int,
    decay: float,
    use_nvlamb: bool | None,
    options: dict[str, Any],
) -> None:
    """The whole of LAMB. ``skip`` is None, or the flag: then each part sees what the parts before it met."""
    decoupled = call.one_of("mode", mode, (0, 1)) == 1
    if not call.length:
        return
    grads, params = call["grads"], call["params"]
    param_norms = _each_norm(params, flag)
    read: Sequence[Tensor] = grads
    if not decoupled and decay != 0:
        read = _new(call)
        foreach.axpby(grads, params, read, found_in(call.no_flag()), foreach_factor(factor), decay)
        factor = torch.ones_like(factor)
    updates = _directions(call, read, call.no_flag() if skip is None else skip, factor, step, options)
    if decoupled and decay != 0:
        foreach.axpby(updates, params, updates, found_in(call.no_flag()), 1.0, decay)
    for g, u in zip(grads, updates, strict=True):
        _keep(g, u, skip)
    _apply(call, grads, param_norms, _each_norm(grads, flag), lr, bool(use_nvlamb) or decay != 0, skip)


def _adam_options(
    call: Call, beta1: Number, beta2: Number, eps: Number, bias_correction: int = 1, grad_averaging: int = 1
) -> dict[str, Any]:
    return {
        **numbers(call, beta1=beta1, beta2=beta2, eps=eps),
        "bias_correction": bool(bias_correction),
        "grad_averaging": bool(grad_averaging),
    }


@torch.no_grad()
def multi_tensor_lamb(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    lr: Number,
    beta1: Number,
    beta2: Number,
    eps: Number,
    step: Number,
    bias_correction: int,
    weight_decay: Number,
    grad_averaging: int,
    mode: int,
    global_grad_norm: Number,
    max_grad_norm: Number,
    use_nvlamb: bool | None = False,
) -> None:
    """LAMB for ``[grads, params, exp_avgs, exp_avg_sqs]``; the gradients become the updates.

    Gradients are first scaled down by ``max_grad_norm / global_grad_norm`` where that is below 1 and the former not 0.
    ``mode`` 0: weight decay is added to the gradients; 1: to the update. The flag becomes 1 where a param or an update
    holds inf or nan, and keeps nothing from happening. No host sync.
    """
    call = Call("multi_tensor_lamb", noop_flag, tensor_lists, _LAMB)
    factor, decay = _clip(call, global_grad_norm, max_grad_norm), call.number("weight_decay", weight_decay)
    options = _adam_options(call, beta1, beta2, eps, bias_correction, grad_averaging)
    with call.flag() as flag:
        _lamb(call, flag, None, factor, lr, step, mode, decay, use_nvlamb, options)


@torch.no_grad()
def multi_tensor_lamb_mp(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    lr: Number,
    beta1: Number,
    beta2: Number,
    eps: Number,
    step: Number,
    bias_correction: int,
    weight_decay: Number,
    grad_averaging: int,
    mode: int,
    global_grad_norm: Number,
    max_grad_norm: Number,
    use_nvlamb: bool | None,
    found_inf: Tensor,
    inv_scale: Number,
) -> None:
    """``multi_tensor_lamb`` on gradients times ``inv_scale``, with a fifth list, if given, that becomes a copy of the
    params. ``global_grad_norm`` and ``max_grad_norm`` are those of the gradients as they are.

    Does nothing where the flag is not 0, nor what is left to do once a param or an update is not finite. ``found_inf``
    has no part in it, as in apex. No host sync.
    """
    call = Call("multi_tensor_lamb_mp", noop_flag, tensor_lists, (*_LAMB, "copies"), optional=1)
    factor = call.tensor("inv_scale", inv_scale) * _clip(call, global_grad_norm, max_grad_norm)
    decay = call.number("weight_decay", weight_decay)
    options = _adam_options(call, beta1, beta2, eps, bias_correction, grad_averaging)
    with call.flag() as flag:
        _lamb(call, flag, flag, factor, lr, step, mode, decay, use_nvlamb, options)


@torch.no_grad()
def multi_tensor_lamb_stage1_cuda(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    per_tensor_decay: Tensor,
    step: Number,
    beta1: Number,
    beta2: Number,
    eps: Number,
    global_grad_norm: Number,
    max_global_grad_norm: Number,
) -> None:
    """``updates`` of ``[grads, params, exp_avgs, exp_avg_sqs, updates]``: Adam's direction plus decay times the param.

    ``per_tensor_decay`` is fp32, one number for each index; ``step`` counts the steps before this one. Gradients are
    scaled down as by ``multi_tensor_lamb``. The flag has no part in it. No host sync.
    """
    call = Call("multi_tensor_lamb_stage1_cuda", noop_flag, tensor_lists, (*_LAMB, "updates"))
    decays = call.vector("per_tensor_decay", per_tensor_decay)
    factor, taken = _clip(call, global_grad_norm, max_global_grad_norm), call.tensor("step", step)
    options = _adam_options(call, beta1, beta2, eps)
    directions = _directions(call, call["grads"], call.no_flag(), factor, taken + 1, options)
    decayed = _times(call["params"], decays)
    foreach.axpby(directions, decayed, call["updates"], found_in(call.no_flag()), 1.0, 1.0)


@torch.no_grad()
def multi_tensor_lamb_stage2_cuda(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    per_tensor_param_norm: Tensor,
    per_tensor_update_norm: Tensor,
    lr: Number,
    weight_decay: Number,
    use_nvlamb: bool | None = False,
) -> None:
    """The step of LAMB for ``[params, updates]`` and their norms (fp32, one for each index).

    ``p -= lr * ||p|| / ||u|| * u``; lr alone where a norm is 0, and without weight decay unless ``use_nvlamb``. The
    flag has no part in it. No host sync.
    """
    call = Call("multi_tensor_lamb_stage2_cuda", noop_flag, tensor_lists, ("params", "updates"))
    param_norms = call.vector("per_tensor_param_norm", per_tensor_param_norm)
    update_norms = call.vector("per_tensor_update_norm", per_tensor_update_norm)
    adapt = bool(use_nvlamb) or call.number("weight_decay", weight_decay) != 0
    _apply(call, call["updates"], param_norms, update_norms, lr, adapt)


@torch.no_grad()
def multi_tensor_lars(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    grad_norms: Tensor,
    param_norms: Tensor,
    lr: Number,
    trust_coefficient: Number,
    eps: Number,
    weight_decay: Number,
    momentum: Number,
    dampening: Number,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: Number,
    is_skipped: bool,
) -> None:
    """LARS for ``[grads, params, momenta]`` and their norms, or with a fourth list that becomes a copy of the params.

    The rate is lr times trust_coefficient ||p|| / (||g|| + weight_decay ||p|| + eps); lr alone where a norm is 0, or
    with ``is_skipped``. With it, b = momentum b - rate (g + weight_decay p) and p += b, or with ``nesterov`` p +=
    momentum b - rate (g + weight_decay p). The other arguments have no part in it, as in ROCm's apex. Does nothing
    where the flag is not 0. No host sync.
    """
    names = ("grads", "params", "momenta", "copies")
    call = Call("multi_tensor_lars", noop_flag, tensor_lists, names, optional=1)
    of_g, of_p = call.vector("grad_norms", grad_norms), call.vector("param_norms", param_norms)
    decay, inertia = call.number("weight_decay", weight_decay), call.number("momentum", momentum)
    trust = call.number("trust_coefficient", trust_coefficient) * of_p / (of_g + of_p * decay + call.number("eps", eps))
    trust = torch.where((of_p > 0) & (of_g > 0) & (not is_skipped), trust, torch.ones_like(trust))
    moves = _new(call)
    with call.flag() as flag:
        foreach.axpby(call["grads"], call["params"], moves, found_in(call.no_flag()), 1.0, decay)
        moves = _times(moves, trust * call.factor("lr", lr))
        # LARS adds what it keeps, SGD subtracts it.
        _step(call, moves, -1.0, flag, momentum=inertia, nesterov=bool(nesterov), maximize=True)
