"""Where pickles of an earlier version look for ``LossScale``."""

from ampctx.scaling.loss_scale import LossScale

__all__ = ["LossScale"]
