"""The optimizer ops of ``torch.ops.ampctx``, typed: one step of many tensors in one call.

All lists hold one entry for each parameter. ``grads``, ``params`` and the state of their size agree in device, number
of elements and memory layout at each index, and in dtype within a list: fp32, fp16, bf16, and fp64 on the CPU.
Arithmetic is fp32 (fp64 where an fp64 tensor takes part). ``steps`` are one-element fp32 tensors, the number of steps
taken so far; a call that is not skipped advances them. ``extras`` depends on ``write_back``
(``ampctx.kernels.reference_steps`` has the table) and is empty for "nearest" and "stochastic".

Each call returns without a change, to the step counts too, where ``found_inf`` (one element, fp32 or int32) is not 0,
as the kernel finds out on the device. Gradients are multiplied by ``inv_scale`` as they are read and stay as they are.
``inv_scale`` and ``lr`` are floats or one-element tensors, fp32 on the device of the lists or on the CPU. ``seed``
feeds the "stochastic" write back, whose random numbers depend on seed, step count and place alone. No host sync.

Lists that stay the same from call to call may be held (``ampctx.ops.HeldTensors``). Autograd is told that ``params``
and ``extras`` changed; the state of an optimizer is in nobody's graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ampctx.kernels.ops import call, factor, wrote
from ampctx.kernels.reference_steps import WRITE_BACKS

_ops = torch.ops.ampctx
_CODES = {name: code for code, name in enumerate(WRITE_BACKS)}

Factor = float | Tensor


def adam(
    grads: Sequence[Tensor],
    params: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor],
    extras: Sequence[Tensor],
    steps: Sequence[Tensor],
    found_inf: Tensor,
    inv_scale: Factor,
    lr: Factor,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    bias_correction: bool = True,
    adam_w_mode: bool = True,
    maximize: bool = False,
    write_back: str = "nearest",
    seed: int = 0,
) -> None:
    """Adam; with decoupled weight decay in ``adam_w_mode``; AMSGrad where ``max_exp_avg_sqs`` is not empty.

    m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2,  u = (m / c1) / (sqrt(v / c2) + eps),
    p -= lr (u + weight_decay p), with c = 1 - beta^step, or 1 without ``bias_correction``. Not in ``adam_w_mode``,
    g + weight_decay p takes the place of g. No host sync.
    """
    call(
        _ops.multi_tensor_adam, (grads, params, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, extras, steps), found_inf,
        factor(inv_scale), factor(lr),
        beta1, beta2, eps, weight_decay, bias_correction, adam_w_mode, maximize, _CODES[write_back], seed,
    )  # fmt: skip
    wrote(params, extras)


def sgd(
    grads: Sequence[Tensor],
    params: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    extras: Sequence[Tensor],
    steps: Sequence[Tensor],
    found_inf: Tensor,
    inv_scale: Factor,
    lr: Factor,
    *,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    wd_after_momentum: bool = False,
    maximize: bool = False,
    write_back: str = "nearest",
    seed: int = 0,
) -> None:
    """SGD: b = momentum b + (1 - dampening) g, or g where the step count is 0; p -= lr b, or lr (g + momentum b) with
    ``nesterov``. Without momentum ``momentum_buffers`` is empty. Weight decay adds weight_decay p to g, or with
    ``wd_after_momentum`` to what lr multiplies. No host sync.
    """
    call(
        _ops.multi_tensor_sgd, (grads, params, momentum_buffers, extras, steps), found_inf,
        factor(inv_scale), factor(lr),
        momentum, dampening, weight_decay, nesterov, wd_after_momentum, maximize, _CODES[write_back], seed,
    )  # fmt: skip
    wrote(params, extras)


def adagrad(
    grads: Sequence[Tensor],
    params: Sequence[Tensor],
    sums: Sequence[Tensor],
    extras: Sequence[Tensor],
    steps: Sequence[Tensor],
    found_inf: Tensor,
    inv_scale: Factor,
    lr: Factor,
    *,
    eps: float,
    weight_decay: float = 0.0,
    adagrad_w_mode: bool = False,
    maximize: bool = False,
    write_back: str = "nearest",
    seed: int = 0,
) -> None:
    """Adagrad: h += g^2, p -= lr g / (sqrt(h) + eps); weight decay through g, or decoupled in ``adagrad_w_mode``. No
    host sync."""
    call(
        _ops.multi_tensor_adagrad, (grads, params, sums, extras, steps), found_inf,
        factor(inv_scale), factor(lr),
        eps, weight_decay, adagrad_w_mode, maximize, _CODES[write_back], seed,
    )  # fmt: skip
    wrote(params, extras)


def lamb(
    grads: Sequence[Tensor],
    params: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    extras: Sequence[Tensor],
    steps: Sequence[Tensor],
    found_inf: Tensor,
    inv_scale: Factor,
    lr: Factor,
    global_grad_norm: Factor,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    max_grad_norm: float = 0.0,
    bias_correction: bool = True,
    adam_w_mode: bool = True,
    grad_averaging: bool = True,
    use_nvlamb: bool = False,
    maximize: bool = False,
    write_back: str = "nearest",
    seed: int = 0,
) -> None:
    """LAMB: Adam's direction u (with weight_decay p in it in ``adam_w_mode``), p -= lr ||p|| / ||u|| u for each tensor.

    Gradients are first scaled down to ``max_grad_norm`` where ``global_grad_norm``, the norm of all unscaled gradients,
    is above it (0: never). The ratio is 1 where a norm is 0, and without weight decay unless ``use_nvlamb``. Without
    ``grad_averaging`` m = beta1 m + g. No host sync.
    """
    call(
        _ops.multi_tensor_lamb, (grads, params, exp_avgs, exp_avg_sqs, extras, steps), found_inf,
        factor(inv_scale), factor(lr), factor(global_grad_norm),
        beta1, beta2, eps, weight_decay, max_grad_norm, bias_correction, adam_w_mode,
        grad_averaging, use_nvlamb, maximize, _CODES[write_back], seed,
    )  # fmt: skip
    wrote(params, extras)


def novograd(
    grads: Sequence[Tensor],
    params: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    extras: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    found_inf: Tensor,
    inv_scale: Factor,
    lr: Factor,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    bias_correction: bool = True,
    grad_averaging: bool = True,
    reg_inside_moment: bool = False,
    inf_norm: bool = False,
    init_zero: bool = False,
    maximize: bool = False,
    write_back: str = "nearest",
    seed: int = 0,
) -> None:
    """NovoGrad: ``exp_avg_sqs`` are one-element fp32 tensors n, the running norm of each gradient.

    n = sqrt(beta2 n^2 + (1 - beta2) ||g||^2), or beta2 n + (1 - beta2) max|g| with ``inf_norm``; n is the norm itself
    where the step count is 0, unless ``init_zero``. With d = n / sqrt(c2) + eps: m = beta1 m + (1 - beta1) g,
    p -= lr (m / c1 / d + weight_decay p); or, with ``reg_inside_moment``, g / d + weight_decay p takes the place of g
    and p -= lr m / c1. No host sync.
    """
    call(
        _ops.multi_tensor_novograd, (grads, params, exp_avgs, extras, exp_avg_sqs, steps), found_inf,
        factor(inv_scale), factor(lr),
        beta1, beta2, eps, weight_decay, bias_correction, grad_averaging, reg_inside_moment, inf_norm, init_zero,
        maximize, _CODES[write_back], seed,
    )  # fmt: skip
    wrote(params, extras)


def larc(
    grads: Sequence[Tensor],
    params: Sequence[Tensor],
    found_inf: Tensor,
    inv_scale: Factor,
    lr: Factor,
    *,
    trust_coefficient: float = 0.02,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    clip: bool = True,
    maximize: bool = False,
) -> None:
    """LARC, in place on the gradients, which are unscaled too: with a = trust_coefficient ||p|| / (||g|| +
    weight_decay ||p|| + eps), or min(a / lr, 1) with ``clip``, g = a (g + weight_decay p), or with ``maximize``
    a (g - weight_decay p). Tensors with a norm of 0 are unscaled alone. No host sync."""
    call(
        _ops.multi_tensor_larc, (grads, params), found_inf, factor(inv_scale), factor(lr),
        trust_coefficient, eps, weight_decay, clip, maximize,
    )  # fmt: skip
    wrote(grads)
