"""Typed optimizer ops. Made from spec.py by csrc/generate.py. See ``ampctx.optimizer_ops``."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ampctx.kernels.ops import call, factor, wrote
from ampctx.kernels.reference_steps import NO_NUMBERS, NO_ROWS, WRITE_BACKS

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
    unscale_grads: bool = False,
    grad_norm: Factor = 1.0,
    max_norm: float = -1.0,
    exp_avg_scales: Sequence[Tensor] = (),
    exp_avg_sq_scales: Sequence[Tensor] = (),
    skips: Sequence[Tensor] = (),
    stochastic_state: bool = False,
    numbers: Tensor = NO_NUMBERS,
    rows: tuple[Tensor, Tensor] = NO_ROWS,
) -> None:
    """Adam; with decoupled weight decay in ``adam_w_mode``; AMSGrad where ``max_exp_avg_sqs`` is not empty.

    m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2,  u = (m / c1) / (sqrt(v / c2) + eps),
    p -= lr (u + weight_decay p), with c = 1 - beta^step, or 1 without ``bias_correction``. Without ``adam_w_mode``
    weight decay adds weight_decay p to g instead. No host sync."""
    op = "multi_tensor_unscaling_adam" if unscale_grads else "multi_tensor_adam"
    lists = (
        grads,
        params,
        exp_avgs,
        exp_avg_sqs,
        max_exp_avg_sqs,
        extras,
        steps,
        exp_avg_scales,
        exp_avg_sq_scales,
        skips,
    )
    call(
        op,
        lists,
        found_inf,
        factor(inv_scale),
        factor(lr),
        factor(grad_norm),
        numbers,
        *rows,
        beta1,
        beta2,
        eps,
        weight_decay,
        bias_correction,
        adam_w_mode,
        maximize,
        _CODES[write_back],
        seed,
        max_norm,
        stochastic_state,
    )
    wrote(params, extras, *((grads,) if unscale_grads else ()))


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
    unscale_grads: bool = False,
    grad_norm: Factor = 1.0,
    max_norm: float = -1.0,
    momentum_buffer_scales: Sequence[Tensor] = (),
    skips: Sequence[Tensor] = (),
    stochastic_state: bool = False,
    numbers: Tensor = NO_NUMBERS,
    rows: tuple[Tensor, Tensor] = NO_ROWS,
) -> None:
    """SGD: p -= lr b, or p -= lr (g + momentum b) with ``nesterov``.

    b = momentum b + (1 - dampening) g; at step count 0, b = g. Without momentum ``momentum_buffers`` is empty. Weight
    decay adds weight_decay p to g, or with ``wd_after_momentum`` to the factor of lr. No host sync."""
    op = "multi_tensor_unscaling_sgd" if unscale_grads else "multi_tensor_sgd"
    lists = (grads, params, momentum_buffers, extras, steps, momentum_buffer_scales, skips)
    call(
        op,
        lists,
        found_inf,
        factor(inv_scale),
        factor(lr),
        factor(grad_norm),
        numbers,
        *rows,
        momentum,
        dampening,
        weight_decay,
        nesterov,
        wd_after_momentum,
        maximize,
        _CODES[write_back],
        seed,
        max_norm,
        stochastic_state,
    )
    wrote(params, extras, *((grads,) if unscale_grads else ()))


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
    unscale_grads: bool = False,
    grad_norm: Factor = 1.0,
    max_norm: float = -1.0,
    skips: Sequence[Tensor] = (),
    stochastic_state: bool = False,
    numbers: Tensor = NO_NUMBERS,
    rows: tuple[Tensor, Tensor] = NO_ROWS,
) -> None:
    """Adagrad: h += g^2, p -= lr g / (sqrt(h) + eps); weight decay through g, or decoupled in ``adagrad_w_mode``.

    No host sync."""
    op = "multi_tensor_unscaling_adagrad" if unscale_grads else "multi_tensor_adagrad"
    lists = (grads, params, sums, extras, steps, skips)
    call(
        op,
        lists,
        found_inf,
        factor(inv_scale),
        factor(lr),
        factor(grad_norm),
        numbers,
        *rows,
        eps,
        weight_decay,
        adagrad_w_mode,
        maximize,
        _CODES[write_back],
        seed,
        max_norm,
        stochastic_state,
    )
    wrote(params, extras, *((grads,) if unscale_grads else ()))


def lion(
    grads: Sequence[Tensor],
    params: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    extras: Sequence[Tensor],
    steps: Sequence[Tensor],
    found_inf: Tensor,
    inv_scale: Factor,
    lr: Factor,
    *,
    beta1: float,
    beta2: float,
    weight_decay: float = 0.0,
    maximize: bool = False,
    write_back: str = "nearest",
    seed: int = 0,
    unscale_grads: bool = False,
    grad_norm: Factor = 1.0,
    max_norm: float = -1.0,
    exp_avg_scales: Sequence[Tensor] = (),
    skips: Sequence[Tensor] = (),
    stochastic_state: bool = False,
    numbers: Tensor = NO_NUMBERS,
    rows: tuple[Tensor, Tensor] = NO_ROWS,
) -> None:
    """Lion: u = sign(beta1 m + (1 - beta1) g), then m = beta2 m + (1 - beta2) g; p -= lr (u + weight_decay p). No
    host sync."""
    op = "multi_tensor_unscaling_lion" if unscale_grads else "multi_tensor_lion"
    lists = (grads, params, exp_avgs, extras, steps, exp_avg_scales, skips)
    call(
        op,
        lists,
        found_inf,
        factor(inv_scale),
        factor(lr),
        factor(grad_norm),
        numbers,
        *rows,
        beta1,
        beta2,
        weight_decay,
        maximize,
        _CODES[write_back],
        seed,
        max_norm,
        stochastic_state,
    )
    wrote(params, extras, *((grads,) if unscale_grads else ()))


def muon(
    grads: Sequence[Tensor],
    params: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    extras: Sequence[Tensor],
    steps: Sequence[Tensor],
    found_inf: Tensor,
    inv_scale: Factor,
    lr: Factor,
    *,
    momentum: float,
    nesterov: bool = True,
    maximize: bool = False,
    write_back: str = "nearest",
    seed: int = 0,
    unscale_grads: bool = False,
    grad_norm: Factor = 1.0,
    max_norm: float = -1.0,
    momentum_buffer_scales: Sequence[Tensor] = (),
    skips: Sequence[Tensor] = (),
    stochastic_state: bool = False,
    numbers: Tensor = NO_NUMBERS,
    rows: tuple[Tensor, Tensor] = NO_ROWS,
) -> None:
    """The average of Muon, which comes before the orthogonalisation: ``params`` become the directions u.

    m = m + (1 - momentum) (g - m), then u = g + momentum (m - g) with ``nesterov``, else u = m. Reads neither lr nor
    the former ``params``. The step of the weights is that of ``sgd``. No host sync."""
    op = "multi_tensor_unscaling_muon" if unscale_grads else "multi_tensor_muon"
    lists = (grads, params, momentum_buffers, extras, steps, momentum_buffer_scales, skips)
    call(
        op,
        lists,
        found_inf,
        factor(inv_scale),
        factor(lr),
        factor(grad_norm),
        numbers,
        *rows,
        momentum,
        nesterov,
        maximize,
        _CODES[write_back],
        seed,
        max_norm,
        stochastic_state,
    )
    wrote(params, extras, *((grads,) if unscale_grads else ()))


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
    unscale_grads: bool = False,
    grad_norm: Factor = 1.0,
    max_norm: float = -1.0,
    exp_avg_scales: Sequence[Tensor] = (),
    exp_avg_sq_scales: Sequence[Tensor] = (),
    skips: Sequence[Tensor] = (),
    stochastic_state: bool = False,
    numbers: Tensor = NO_NUMBERS,
    rows: tuple[Tensor, Tensor] = NO_ROWS,
) -> None:
    """LAMB: p -= lr ||p|| / ||u|| u, with Adam's direction u (plus weight_decay p in ``adam_w_mode``).

    The ratio is per tensor. It is 1 if a norm is 0, and without weight decay unless ``use_nvlamb``. Gradients are first
    scaled down to ``max_grad_norm`` if ``global_grad_norm``, the norm of all unscaled gradients, exceeds it (0: never).
    Without ``grad_averaging``, m = beta1 m + g. No host sync."""
    op = "multi_tensor_unscaling_lamb" if unscale_grads else "multi_tensor_lamb"
    lists = (grads, params, exp_avgs, exp_avg_sqs, extras, steps, exp_avg_scales, exp_avg_sq_scales, skips)
    call(
        op,
        lists,
        found_inf,
        factor(inv_scale),
        factor(lr),
        factor(global_grad_norm),
        factor(grad_norm),
        numbers,
        *rows,
        beta1,
        beta2,
        eps,
        weight_decay,
        max_grad_norm,
        bias_correction,
        adam_w_mode,
        grad_averaging,
        use_nvlamb,
        maximize,
        _CODES[write_back],
        seed,
        max_norm,
        stochastic_state,
    )
    wrote(params, extras, *((grads,) if unscale_grads else ()))
