"""fused_mix_prec_layer_norm_cuda, of Megatron-LM: layer norm whose output has the type of the weight."""

import torch
from ampctx_apex import kernels_norms
from ampctx_apex.installed import attribute_of

forward_affine = torch.no_grad()(kernels_norms.forward_affine_mixed_dtypes)
backward_affine = torch.no_grad()(kernels_norms.backward_affine)

__getattr__ = attribute_of(__name__)

__all__ = ["backward_affine", "forward_affine"]
