"""fused_weight_gradient_mlp_cuda: adds a linear layer's weight gradient to an existing tensor, on any device.

Megatron-LM and its forks call it where ``gradient_accumulation_fusion`` is on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from ampctx_apex.arguments import check_tensor, without_autocast
from torch import Tensor

from ampctx import AmpValueError

_LOW_PRECISION = (torch.float16, torch.bfloat16)
_ANY = (torch.float32, *_LOW_PRECISION)


def _rows(op: str, input: Tensor, d_output: Tensor, main_grad: Tensor, dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """``input`` and ``d_output`` with all dimensions but the last as one."""
    check_tensor(op, "input", input, dtypes=dtypes)
    check_tensor(op, "d_output", d_output, dtypes=(input.dtype,), beside=("input", input))
    rows = []
    for name, t in (("input", input), ("d_output", d_output)):
        if t.dim() < 2:
            raise AmpValueError(f"{op}: {name} has shape {tuple(t.shape)}, expected 2 dimensions or more")
        rows.append(t.flatten(0, -2))
    if rows[0].size(0) != rows[1].size(0):
        raise AmpValueError(f"{op}: input has {rows[0].size(0)} tokens, d_output has {rows[1].size(0)}")
    check_tensor(op, "main_grad", main_grad, shape=(d_output.size(-1), input.size(-1)), beside=("input", input))
    return rows


@torch.no_grad()
def wgrad_gemm_accum_fp32(input: Tensor, d_output: Tensor, main_grad: Tensor) -> None:
    """``main_grad += d_output.T @ input`` over all tokens, in fp32 and in place. No host sync.

    Args:
        input: [tokens.., in], fp32, fp16 or bf16; the layer's input. Zero tokens add nothing.
        d_output: [tokens.., out], of the same dtype; the gradient of the layer's output.
        main_grad: [out, in], fp32.
    """
    op = "wgrad_gemm_accum_fp32"
    x, dy = _rows(op, input, d_output, main_grad, _ANY)
    check_tensor(op, "main_grad", main_grad, dtypes=(torch.float32,))
    with without_autocast(input):
        if input.is_cuda and input.dtype in _LOW_PRECISION and x.numel() and dy.numel():
            # The product of 16-bit numbers, summed and returned in fp32: torch has it for CUDA alone.
            main_grad.add_(torch.mm(dy.t(), x, out_dtype=torch.float32))
        else:
            main_grad.addmm_(dy.t().float(), x.float())


@torch.no_grad()
def wgrad_gemm_accum_fp16(input: Tensor, d_output: Tensor, main_grad: Tensor) -> None:
    """``wgrad_gemm_accum_fp32`` for fp16 or bf16 alone, to which the sum in ``main_grad`` is rounded once."""
    op = "wgrad_gemm_accum_fp16"
    x, dy = _rows(op, input, d_output, main_grad, _LOW_PRECISION)
    check_tensor(op, "main_grad", main_grad, dtypes=(input.dtype,))
    with without_autocast(input):
        if input.is_cuda:
            main_grad.addmm_(dy.t(), x)
        else:
            main_grad.copy_(main_grad.float().addmm_(dy.t().float(), x.float()))
