"""apex.optimizers.fused_mixed_precision_lamb: the class of ``ampctx.optimizers``."""

from ampctx.optimizers import FusedMixedPrecisionLamb

__all__ = ["FusedMixedPrecisionLamb"]
