"""apex.normalization: torch's layer_norm and rms_norm with apex's rules for types."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)

from .fused_layer_norm import FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm

__all__ = ["FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm"]
