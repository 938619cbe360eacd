"""fast_layer_norm: the functions of ``apex.contrib.layer_norm``, for any hidden size and device."""

from __future__ import annotations

import fused_layer_norm_cuda
import torch
from torch import Tensor


def ln_fwd(x: Tensor, gamma: Tensor, beta: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """``fused_layer_norm_cuda.forward_affine_mixed_dtypes`` over the last dimension.

    Args:
        x: [*, hidden], fp32, fp16, bf16 or fp64.
        gamma, beta: [hidden], the weight and the bias, of any floating type.

    Returns:
        The output, of the type of ``gamma``; mean and 1 / deviation of each row, fp32 (fp64 for fp64 ``x``).
    """
    return fused_layer_norm_cuda.forward_affine_mixed_dtypes(x, gamma.shape, gamma, beta, epsilon)


def ln_bwd(
    dz: Tensor,
    x_or_z: Tensor,
    mu: Tensor | None,
    rsigma: Tensor,
    gamma: Tensor,
    beta: Tensor | None = None,
    memory_efficient: bool = False,
) -> tuple[Tensor | None, ...]:
    """The gradients of ``x``, ``gamma`` and ``beta``, then apex's two workspaces, which are None here.

    Args:
        dz: the gradient of the output.
        x_or_z: the input; with ``memory_efficient`` the output.
        mu, rsigma: what ``ln_fwd`` returned. ``mu`` may be None with ``memory_efficient``.
        beta: needed with ``memory_efficient`` only.
    """
    bias = torch.zeros_like(gamma) if beta is None else beta
    # A weight of 0 is to give no inf.
    eps = torch.finfo(torch.float32).tiny
    grads = fused_layer_norm_cuda.backward_affine(
        dz, mu, rsigma, x_or_z, gamma.shape, gamma, bias, eps, memory_efficient
    )
    return *grads, None, None
