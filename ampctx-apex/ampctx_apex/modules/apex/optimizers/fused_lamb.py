"""apex.optimizers.fused_lamb: the class of ``ampctx.optimizers``."""

from ampctx.optimizers import FusedLAMB

__all__ = ["FusedLAMB"]
