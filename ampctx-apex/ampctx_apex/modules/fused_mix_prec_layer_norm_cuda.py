"""fused_mix_prec_layer_norm_cuda, of Megatron-LM: layer norm whose output has the type of the weight."""

from fused_layer_norm_cuda import backward_affine
from fused_layer_norm_cuda import forward_affine_mixed_dtypes as forward_affine

__all__ = ["backward_affine", "forward_affine"]
