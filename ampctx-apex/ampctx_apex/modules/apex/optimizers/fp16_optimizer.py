"""apex.optimizers.fp16_optimizer: where ``apex.contrib.optimizers.FP16_Optimizer`` was before."""

from ..contrib.optimizers import FP16_Optimizer

__all__ = ["FP16_Optimizer"]
