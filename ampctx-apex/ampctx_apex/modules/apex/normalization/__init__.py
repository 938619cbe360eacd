"""apex.normalization: torch's layer_norm and rms_norm with apex's rules for types."""

from .fused_layer_norm import FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm
