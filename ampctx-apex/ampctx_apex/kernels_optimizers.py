"""The optimizer steps of amp_C that work element by element, and NovoGrad's, as calls of ampctx's ops.

``modules/amp_C.py`` has what all of amp_C's functions share. Arithmetic is fp32 (fp64 where an fp64 tensor takes part)
and state may be of any floating type. ``lr``, ``scale``, ``inv_scale`` and ``step`` may be tensors, which the host does
not read; tensors in the place of other numbers are read. The formulas are in ``ampctx.optimizer_ops``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ampctx import foreach, spi
from ampctx.spi import Call, Number, TensorLists, found_in

Lists = Mapping[str, Sequence[Tensor]]
# Lists of the ops that stay empty where a function of amp_C has nothing to put in.
_EMPTY = {
    "adam": ("max_exp_avg_sqs", "extras"),
    "sgd": ("momentum_buffers", "extras"),
    "adagrad": ("extras",),
    "novograd": ("extras",),
    "lamb": ("extras",),
}


def run_op(
    op: str, call: Call, lists: Lists, step: Number, found_inf: Tensor, along: Lists | None = None, **arguments: Any
) -> None:
    """One op call for each combination of dtypes and layouts in ``lists``, which are named as the op names them.

    Args:
        step: the number of the step, from 1.
        found_inf: nothing happens where it is not 0.
        along: lists of one-element tensors.
        arguments: the op's others.
    """
    taken = call.tensor("step", step) - 1
    one_element = {"steps": taken.repeat(call.length).unbind(), **(along or {})}
    spi.run_op(op, lists, one_element, _EMPTY[op], {"found_inf": found_inf, "maximize": False, **arguments})


def numbers(call: Call, **given: Number) -> dict[str, Any]:
    return {name: call.number(name, value) for name, value in given.items()}


@torch.no_grad()
def multi_tensor_sgd(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    wd: Number,
    momentum: Number,
    dampening: Number,
    lr: Number,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: Number,
) -> None:
    """SGD for ``[grads, params, momenta]``, or with a fourth list that becomes a copy of the params.

    Gradients are multiplied by ``scale`` as they are read. ``first_run`` sets the momenta to the gradients; without
    momentum they stay as they are. Does nothing where the flag is not 0. No host sync.
    """
    names = ("grads", "params", "momenta", "copies")
    call = Call("multi_tensor_sgd", noop_flag, tensor_lists, names, optional=1)
    options = numbers(call, weight_decay=wd, momentum=momentum, dampening=dampening)
    lists = {"grads": call["grads"], "params": call["params"]}
    if options["momentum"] != 0:
        lists["momentum_buffers"] = call["momenta"]
    if "copies" in call.lists:
        lists["extras"] = call["copies"]
    with call.flag() as flag:
        run_op(
            "sgd",
            call,
            lists,
            1 if first_run else 2,
            flag,
            inv_scale=call.factor("scale", scale),
            lr=call.factor("lr", lr),
            nesterov=bool(nesterov),
            wd_after_momentum=bool(wd_after_momentum),
            **options,
        )


_ADAM = ("grads", "params", "exp_avgs", "exp_avg_sqs")


@torch.no_grad()
def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    lr: Number,
    beta1: Number,
    beta2: Number,
    eps: Number,
    step: Number,
    mode: int,
    bias_correction: int,
    weight_decay: Number,
) -> None:
    """Adam for ``[grads, params, exp_avgs, exp_avg_sqs]``; ``step`` counts this one.

    ``mode`` 0: weight decay is added to the gradients; 1: it is decoupled. The flag has no part in it. No host sync.
    """
    call = Call("multi_tensor_adam", noop_flag, tensor_lists, _ADAM)
    options = numbers(call, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay)
    options |= {"adam_w_mode": bool(call.one_of("mode", mode, (0, 1))), "bias_correction": bool(bias_correction)}
    run_op("adam", call, call.lists, step, call.no_flag(), inv_scale=1.0, lr=call.factor("lr", lr), **options)


@torch.no_grad()
def multi_tensor_adam_capturable(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    lr: Number,
    beta1: Number,
    beta2: Number,
    eps: Number,
    step: Number,
    mode: int,
    bias_correction: int,
    weight_decay: Number,
    inv_scale: Number,
) -> None:
    """``multi_tensor_adam`` on gradients times ``inv_scale``, which are left multiplied.

    Does nothing where the flag is not 0. No host sync.
    """
    call = Call("multi_tensor_adam_capturable", noop_flag, tensor_lists, _ADAM)
    _adam_capturable(call, lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay, inv_scale)


@torch.no_grad()
def multi_tensor_adam_capturable_master(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    lr: Number,
    beta1: Number,
    beta2: Number,
    eps: Number,
    step: Number,
    mode: int,
    bias_correction: int,
    weight_decay: Number,
    inv_scale: Number,
) -> None:
    """``multi_tensor_adam_capturable`` with a fifth list of masters: it steps these, and params become their copies."""
    call = Call("multi_tensor_adam_capturable_master", noop_flag, tensor_lists, (*_ADAM, "masters"))
    _adam_capturable(call, lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay, inv_scale)


def _adam_capturable(
    call: Call,
    lr: Number,
    beta1: Number,
    beta2: Number,
    eps: Number,
    step: Number,
    mode: int,
    bias_correction: int,
    weight_decay: Number,
    inv_scale: Number,
) -> None:
    options = numbers(call, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay)
    options |= {"adam_w_mode": bool(call.one_of("mode", mode, (0, 1))), "bias_correction": bool(bias_correction)}
    lists: dict[str, list[Tensor]] = dict(call.lists)
    if "masters" in lists:
        lists["extras"], lists["params"] = lists["params"], lists.pop("masters")
    factor = call.tensor("inv_scale", inv_scale)
    with call.flag() as flag:
        given = {"inv_scale": factor, "lr": call.factor("lr", lr), "unscale_grads": True, **options}
        run_op("adam", call, lists, step, flag, **given)


@torch.no_grad()
def multi_tensor_adagrad(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    lr: Number,
    eps: Number,
    mode: int,
    weight_decay: Number,
) -> None:
    """Adagrad for ``[grads, params, sums]``; ``mode`` as in ``multi_tensor_adam``.

    The flag has no part in it. No host sync.
    """
    call = Call("multi_tensor_adagrad", noop_flag, tensor_lists, ("grads", "params", "sums"))
    options = numbers(call, eps=eps, weight_decay=weight_decay)
    options |= {"adagrad_w_mode": bool(call.one_of("mode", mode, (0, 1)))}
    run_op("adagrad", call, call.lists, 1, call.no_flag(), inv_scale=1.0, lr=call.factor("lr", lr), **options)


@torch.no_grad()
def multi_tensor_novograd(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    grad_norms: Tensor,
    lr: Number,
    beta1: Number,
    beta2: Number,
    eps: Number,
    step: Number,
    bias_correction: int,
    weight_decay: Number,
    grad_averaging: int,
    moment_mode: int,
    norm_type: int,
) -> None:
    """NovoGrad for ``[grads, params, exp_avgs]`` and the running norms ``grad_norms`` (fp32, one for each index).

    The norms are blended with those of the gradients (L2 for ``norm_type`` 2, largest element for 0) before they are
    used. ``moment_mode`` 0: weight decay goes into the moment; 1: it does not. The flag becomes 1 where a gradient
    holds inf or nan, and keeps nothing from happening. No host sync.
    """
    call = Call("multi_tensor_novograd", noop_flag, tensor_lists, ("grads", "params", "exp_avgs"))
    norms = call.vector("grad_norms", grad_norms)
    options = numbers(call, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay)
    options |= {
        "bias_correction": bool(bias_correction),
        "grad_averaging": bool(grad_averaging),
        "reg_inside_moment": call.one_of("moment_mode", moment_mode, (0, 1)) == 0,
        "inf_norm": call.one_of("norm_type", norm_type, (0, 2)) == 0,
        "init_zero": True,  # the caller put the first norm into grad_norms, or 0
    }
    along = {"exp_avg_sqs": norms.unbind()}
    with call.flag() as flag:
        foreach.l2norm(call["grads"], found_in(flag))
        run_op(
            "novograd",
            call,
            call.lists,
            step,
            call.no_flag(),
            along,
            inv_scale=1.0,
            lr=call.factor("lr", lr),
            **options,
        )
