"""apex.optimizers.fused_novograd: the class of ``ampctx.optimizers``."""

from ampctx.optimizers import FusedNovoGrad

__all__ = ["FusedNovoGrad"]
