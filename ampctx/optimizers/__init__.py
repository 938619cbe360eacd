"""The optimizers of apex, and LARC: each step one op call for each bucket of parameters, without a host sync.

docs/optimizers.md tells how they are used.
"""

from ampctx.optimizers.fused_adagrad import FusedAdagrad
from ampctx.optimizers.fused_adam import FusedAdam
from ampctx.optimizers.fused_lamb import FusedLAMB, FusedMixedPrecisionLamb
from ampctx.optimizers.fused_lion import FusedLion
from ampctx.optimizers.fused_novograd import FusedNovoGrad
from ampctx.optimizers.fused_sgd import FusedSGD
from ampctx.optimizers.larc import LARC

__all__ = [
    "LARC",
    "FusedAdagrad",
    "FusedAdam",
    "FusedLAMB",
    "FusedLion",
    "FusedMixedPrecisionLamb",
    "FusedNovoGrad",
    "FusedSGD",
]
