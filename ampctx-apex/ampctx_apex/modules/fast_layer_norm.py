"""fast_layer_norm: the functions of ``apex.contrib.layer_norm``, for any hidden size and device."""

from __future__ import annotations

import fused_layer_norm_cuda
import torch
from torch import Tensor


def ln_fwd(x: Tensor, gamma: Tensor, beta: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """``fused_layer_norm_cuda.forward_affine_mixed_dtypes`` over the last dimension."""
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
    """``fused_layer_norm_cuda.backward_affine``, then apex's two workspaces, which are None here.

    ``beta`` is needed with ``memory_efficient`` only.
    """
    bias = torch.zeros_like(gamma) if beta is None else beta
    # A weight of 0 is to give no inf.
    eps = torch.finfo(torch.float32).tiny
    grads = fused_layer_norm_cuda.backward_affine(
        dz, mu, rsigma, x_or_z, gamma.shape, gamma, bias, eps, memory_efficient
    )
    return *grads, None, None
