"""apex.contrib.optimizers.FusedLAMB: ``ampctx.optimizers.FusedLAMB``, whose first arguments are the old ones."""

from ampctx.optimizers import FusedLAMB

__all__ = ["FusedLAMB"]
