"""apex.optimizers.fused_adam: the class of ``ampctx.optimizers``."""

from ampctx.optimizers import FusedAdam

__all__ = ["FusedAdam"]
