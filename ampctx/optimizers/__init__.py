"""The fused optimizers of apex, Lion, Muon, and LARC. A step calls one op for each bucket of parameters, without a host
sync.

docs/optimizers.md shows how to use them.
"""

from ampctx.optimizers._state_types import unpack_state
from ampctx.optimizers.fused_adagrad import FusedAdagrad
from ampctx.optimizers.fused_adam import FusedAdam
from ampctx.optimizers.fused_lamb import FusedLAMB, FusedMixedPrecisionLamb
from ampctx.optimizers.fused_lion import FusedLion
from ampctx.optimizers.fused_muon import FusedMuon
from ampctx.optimizers.fused_novograd import FusedNovoGrad
from ampctx.optimizers.fused_sgd import FusedSGD
from ampctx.optimizers.larc import LARC
from ampctx.optimizers.split_masters import SplitMasters

__all__ = [
    "LARC",
    "FusedAdagrad",
    "FusedAdam",
    "FusedLAMB",
    "FusedLion",
    "FusedMixedPrecisionLamb",
    "FusedMuon",
    "FusedNovoGrad",
    "FusedSGD",
    "SplitMasters",
    "unpack_state",
]
