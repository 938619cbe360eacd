"""apex.contrib.optimizers: the fused optimizers from before ``apex.optimizers``, and their FP16_Optimizer."""

import importlib
from pkgutil import extend_path
from typing import Any

from ampctx_apex.install import ApexImportError

__path__ = extend_path(__path__, __name__)

from .fp16_optimizer import FP16_Optimizer
from .fused_adam import FusedAdam
from .fused_lamb import FusedLAMB
from .fused_sgd import FusedSGD

_ELSEWHERE = {"DistributedFusedAdam": "distributed_fused_adam", "DistributedFusedLAMB": "distributed_fused_lamb"}


def __getattr__(name: str) -> Any:
    # Those of an apex that is installed as well; without one, refusals.
    if name in _ELSEWHERE:
        try:
            return getattr(importlib.import_module(f"{__name__}.{_ELSEWHERE[name]}"), name)
        except ApexImportError as error:
            raise AttributeError(str(error)) from None
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_ELSEWHERE])


__all__ = ["FP16_Optimizer", "FusedAdam", "FusedLAMB", "FusedSGD"]
