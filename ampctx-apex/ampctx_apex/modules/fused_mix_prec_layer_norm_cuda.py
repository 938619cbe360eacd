"""fused_mix_prec_layer_norm_cuda, of Megatron-LM: layer norm whose output has the type of the weight."""

from ampctx_apex.kernels_norms import backward_affine
from ampctx_apex.kernels_norms import forward_affine_mixed_dtypes as forward_affine

__all__ = ["backward_affine", "forward_affine"]
