"""apex.optimizers.fused_adagrad: the class of ``ampctx.optimizers``."""

from ampctx.optimizers import FusedAdagrad

__all__ = ["FusedAdagrad"]
