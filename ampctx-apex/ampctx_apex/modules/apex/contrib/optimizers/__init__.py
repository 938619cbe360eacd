"""apex.contrib.optimizers: the fused optimizers from before ``apex.optimizers``, and their FP16_Optimizer."""

from ampctx.optimizers import FusedLAMB

from .fp16_optimizer import FP16_Optimizer
from .fused import FusedAdam, FusedSGD

__all__ = ["FP16_Optimizer", "FusedAdam", "FusedLAMB", "FusedSGD"]
