"""apex.optimizers.fused_sgd: the class of ``ampctx.optimizers``."""

from ampctx.optimizers import FusedSGD

__all__ = ["FusedSGD"]
