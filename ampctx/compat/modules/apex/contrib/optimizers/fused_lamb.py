"""apex.contrib.optimizers.FusedLAMB: ``ampctx.optimizers.FusedLAMB``, whose arguments begin with the old ones."""

from ampctx.optimizers import FusedLAMB

__all__ = ["FusedLAMB"]
