"""fused_layer_norm_cuda: layer norm and RMS norm with their statistics, on any device. No gradient flows through.

``apex.normalization`` has the layers. See ``ampctx_apex.kernels_norms`` for the arguments.
"""

import torch
from ampctx_apex import kernels_norms
from ampctx_apex.installed import attribute_of

forward = torch.no_grad()(kernels_norms.forward)
forward_affine = torch.no_grad()(kernels_norms.forward_affine)
forward_affine_mixed_dtypes = torch.no_grad()(kernels_norms.forward_affine_mixed_dtypes)
backward = torch.no_grad()(kernels_norms.backward)
backward_affine = torch.no_grad()(kernels_norms.backward_affine)
rms_forward = torch.no_grad()(kernels_norms.rms_forward)
rms_forward_affine = torch.no_grad()(kernels_norms.rms_forward_affine)
rms_forward_affine_mixed_dtypes = torch.no_grad()(kernels_norms.rms_forward_affine_mixed_dtypes)
rms_backward = torch.no_grad()(kernels_norms.rms_backward)
rms_backward_affine = torch.no_grad()(kernels_norms.rms_backward_affine)

__getattr__ = attribute_of(__name__)

__all__ = [
    "backward",
    "backward_affine",
    "forward",
    "forward_affine",
    "forward_affine_mixed_dtypes",
    "rms_backward",
    "rms_backward_affine",
    "rms_forward",
    "rms_forward_affine",
    "rms_forward_affine_mixed_dtypes",
]
