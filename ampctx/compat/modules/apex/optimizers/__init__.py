"""apex.optimizers: the classes of ``ampctx.optimizers``."""

import importlib
from pkgutil import extend_path
from typing import Any

from ampctx.optimizers import (
    FusedAdagrad,
    FusedAdam,
    FusedLAMB,
    FusedMixedPrecisionLamb,
    FusedNovoGrad,
    FusedSGD,
)

__path__ = extend_path(__path__, __name__)

from . import fused_adagrad, fused_adam, fused_lamb, fused_mixed_precision_lamb, fused_novograd, fused_sgd
from .fp16_optimizer import FP16_Optimizer


def __getattr__(name: str) -> Any:
    # Of ROCm's apex; where that is not installed, a class that refuses when it is called.
    if name == "FusedLARS":
        return importlib.import_module(f"{__name__}.fused_lars").FusedLARS
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), "FusedLARS"])


__all__ = [
    "FP16_Optimizer",
    "FusedAdagrad",
    "FusedAdam",
    "FusedLAMB",
    "FusedMixedPrecisionLamb",
    "FusedNovoGrad",
    "FusedSGD",
    "fused_adagrad",
    "fused_adam",
    "fused_lamb",
    "fused_mixed_precision_lamb",
    "fused_novograd",
    "fused_sgd",
]
