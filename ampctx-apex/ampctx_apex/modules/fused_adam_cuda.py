"""fused_adam_cuda: the Adam step of ``apex.contrib.optimizers.FusedAdam``, on any device.

``p -= rate * (m / (sqrt(v) + eps) + decay * p)``. The rate is ``lr * sqrt(1 - beta2**step) / (1 - beta1**step)``, or
``lr`` without ``bias_correction``. Arithmetic is fp32, or fp64 where an fp64 tensor takes part.
"""

from __future__ import annotations

import math

import torch
from ampctx_apex.arguments import check_tensor
from ampctx_apex.installed import attribute_of
from ampctx_apex.kernels_optimizers import numbers, run_op
from torch import Tensor

from ampctx import AmpNotImplementedError, AmpValueError
from ampctx.spi import Call, Number, TensorLists


@torch.no_grad()
def adam(
    p: Tensor, p_copy: Tensor, m: Tensor, v: Tensor, g: Tensor, lr: Number, beta1: Number, beta2: Number, eps: Number,
    grad_scale: Number, step: Number, mode: int, bias_correction: int = 1, decay: Number = 0.0,
) -> None:  # fmt: skip
    """Steps one parameter, in place. No host sync, except for tensors in place of numbers.

    Args:
        p, m, v: the parameter and its two moments, of any shape with the same number of elements; fp32, fp16, bf16 or
            fp64.
        p_copy: becomes a copy of the new parameter, rounded to its own type. An empty tensor: none.
        g: the gradient, which is divided by ``grad_scale``.
        step: the number of this step, from 1.
        mode: 1. 0, which adds ``eps`` under the root, is not supported.

    Raises:
        AmpNotImplementedError: ``mode`` 0.
        AmpTypeError, AmpValueError: an argument does not fit. The message names it.
    """
    check_tensor("adam", "p", p)
    copies = [[p_copy]] if not isinstance(p_copy, Tensor) or p_copy.numel() else []
    _step(
        "adam", torch.zeros(1, dtype=torch.int32, device=p.device), [[p], [m], [v], [g], *copies],
        lr, beta1, beta2, eps, grad_scale, step, mode, bias_correction, decay,
    )  # fmt: skip


@torch.no_grad()
def adam_mt(
    chunk_size: int, overflow_flag: Tensor, tensor_lists: TensorLists, lr: Number, beta1: Number, beta2: Number,
    eps: Number, grad_scale: Number, step: Number, mode: int, bias_correction: int = 1, decay: Number = 0.0,
) -> None:  # fmt: skip
    """``adam`` for ``tensor_lists = [p, m, v, g]``, or with a fifth list of copies. The flag has no part in it."""
    _step("adam_mt", overflow_flag, tensor_lists, lr, beta1, beta2, eps, grad_scale, step, mode, bias_correction, decay)


def _step(
    op: str, flag: Tensor, tensor_lists: TensorLists, lr: Number, beta1: Number, beta2: Number, eps: Number,
    grad_scale: Number, step: Number, mode: int, bias_correction: int, decay: Number,
) -> None:  # fmt: skip
    call = Call(op, flag, tensor_lists, ("p", "m", "v", "g", "p_copy"), optional=1)
    if call.one_of("mode", mode, (0, 1)) == 0:
        raise AmpNotImplementedError(
            f"{op}: mode 0 (eps_inside_sqrt=True) is not supported by ampctx: pass mode 1, which adds eps to the root"
        )
    options = numbers(call, beta1=beta1, beta2=beta2, eps=eps, weight_decay=decay)
    rate, number, scale = call.number("lr", lr), call.number("step", step), call.number("grad_scale", grad_scale)
    if not number >= 1:
        raise AmpValueError(f"{op}: step is {number}, expected the number of this step, from 1")
    if not scale > 0:
        raise AmpValueError(f"{op}: grad_scale is {scale:g}, expected a number > 0")
    if bias_correction:
        rate *= math.sqrt(1 - options["beta2"] ** number) / (1 - options["beta1"] ** number)
    lists = {"params": call["p"], "exp_avgs": call["m"], "exp_avg_sqs": call["v"], "grads": call["g"]}
    if "p_copy" in call.lists:
        lists["extras"] = call["p_copy"]
    # Uncorrected, the op has this formula, with a rate that holds both corrections.
    options |= {"adam_w_mode": True, "bias_correction": False, "lr": rate}
    run_op("adam", call, lists, number, call.no_flag(), inv_scale=1.0 / scale, **options)


__getattr__ = attribute_of(__name__)

__all__ = ["adam", "adam_mt"]
