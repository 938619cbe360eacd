"""The fused optimizers of apex, Lion, Muon, and LARC. A step calls one op for each bucket of parameters, without a host
sync."""

import typing as _typing

from ampctx.optimizers._state_types import unpack_state
from ampctx.optimizers.fused_adagrad import FusedAdagrad
from ampctx.optimizers.fused_adam import FusedAdam
from ampctx.optimizers.fused_lamb import FusedLAMB
from ampctx.optimizers.fused_lion import FusedLion
from ampctx.optimizers.fused_muon import FusedMuon
from ampctx.optimizers.fused_novograd import FusedNovoGrad
from ampctx.optimizers.fused_sgd import FusedSGD
from ampctx.optimizers.larc import LARC
from ampctx.optimizers.offloaded import Offloaded
from ampctx.optimizers.split_masters import SplitMasters

__all__ = [
    "LARC",
    "FusedAdagrad",
    "FusedAdam",
    "FusedLAMB",
    "FusedLion",
    "FusedMuon",
    "FusedNovoGrad",
    "FusedSGD",
    "Offloaded",
    "SplitMasters",
    "unpack_state",
]

if not _typing.TYPE_CHECKING:

    def __getattr__(name: str) -> None:
        if name == "FusedMixedPrecisionLamb":
            raise ImportError(
                "ampctx.optimizers.FusedMixedPrecisionLamb is apex.optimizers.FusedMixedPrecisionLamb of ampctx-apex. "
                "For new code: FusedLAMB(params, capturable=True, master_weights=True)."
            )
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
