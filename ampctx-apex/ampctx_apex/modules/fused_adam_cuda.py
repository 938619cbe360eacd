"""fused_adam_cuda: the Adam step of ``apex.contrib.optimizers.FusedAdam``, on any device.

``p -= rate * (m / (sqrt(v) + eps) + decay * p)``. The rate is ``lr * sqrt(1 - beta2**step) / (1 - beta1**step)``, or
``lr`` without ``bias_correction``. Arithmetic is fp32, or fp64 where an fp64 tensor takes part.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from ampctx_apex.arguments import check_tensor
from ampctx_apex.multi_tensor import Call, multi_tensor, run_op
from torch import Tensor

from ampctx import AmpNotImplementedError, AmpValueError


def _step(
    call: Call,
    lr: float,
    grad_scale: float,
    step: float,
    mode: int,
    bias_correction: bool,
    decay: float,
    **options: float,
) -> None:
    """``adam`` for ``tensor_lists = [p, m, v, g]``, or with a fifth list of copies. The flag has no part in it."""
    if mode == 0:
        raise AmpNotImplementedError(
            f"{call.op}: mode 0 (eps_inside_sqrt=True) is not supported by ampctx: pass mode 1, which adds eps to the "
            "root"
        )
    if not step >= 1:
        raise AmpValueError(f"{call.op}: step is {step}, expected the number of this step, from 1")
    if not grad_scale > 0:
        raise AmpValueError(f"{call.op}: grad_scale is {grad_scale:g}, expected a number > 0")
    if bias_correction:
        lr *= math.sqrt(1 - options["beta2"] ** step) / (1 - options["beta1"] ** step)
    as_op = {"p": "params", "m": "exp_avgs", "v": "exp_avg_sqs", "g": "grads", "p_copy": "extras"}
    lists = {as_op[name]: tensors for name, tensors in call.lists.items()}
    # Uncorrected, the op has this formula, with a rate that holds both corrections.
    numbers = {"adam_w_mode": True, "bias_correction": False, "lr": lr, "weight_decay": decay, **options}
    run_op("adam", call, lists, step - 1, call.no_flag(), inv_scale=1.0 / grad_scale, **numbers)


_form = functools.partial(
    multi_tensor,
    "p m v g p_copy",
    "lr beta1 beta2 eps grad_scale step mode bias_correction=1 decay=0",
    optional=1,
    lr=Call.number,
    grad_scale=Call.number,
    step=Call.number,
)
adam_mt = _form(op="adam_mt")(_step)
_adam = _form(op="adam")(_step)


def adam(p: Tensor, p_copy: Tensor, m: Tensor, v: Tensor, g: Tensor, *args: Any, **kwargs: Any) -> None:
    """Steps one parameter, in place. No host sync, except for tensors in place of numbers.

    Args:
        p, m, v: the parameter and its two moments, of any shape with the same number of elements; fp32, fp16, bf16 or
            fp64.
        p_copy: becomes a copy of the new parameter, rounded to its own type. An empty tensor: none.
        g: the gradient, which is divided by ``grad_scale``.
        args, kwargs: lr, beta1, beta2, eps, grad_scale, step, the number of this step from 1, mode, which is 1, as 0
            adds ``eps`` under the root, which is not supported, bias_correction=1, decay=0.

    Raises:
        AmpNotImplementedError: ``mode`` 0.
        AmpTypeError, AmpValueError: an argument does not fit. The message names it.
    """
    check_tensor("adam", "p", p)
    copies = [[p_copy]] if not isinstance(p_copy, Tensor) or p_copy.numel() else []
    flag = torch.zeros(1, dtype=torch.int32, device=p.device)
    _adam(0, flag, [[p], [m], [v], [g], *copies], *args, **kwargs)


__all__ = ["adam", "adam_mt"]
