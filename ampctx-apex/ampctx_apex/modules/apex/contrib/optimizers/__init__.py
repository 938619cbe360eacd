"""apex.contrib.optimizers: the fused optimizers from before ``apex.optimizers``, and their FP16_Optimizer."""

from pkgutil import extend_path

from ampctx_apex.install import also_called

from ampctx.optimizers import FusedLAMB

__path__ = extend_path(__path__, __name__)

from .fp16_optimizer import FP16_Optimizer
from .fused import FusedAdam, FusedSGD

also_called(__name__, "fused_adam", "fused_lamb", "fused_sgd")

__all__ = ["FP16_Optimizer", "FusedAdam", "FusedLAMB", "FusedSGD"]
