"""apex.optimizers: the classes of ``ampctx.optimizers``, with the kernels that apex's instances have as attributes."""

import functools
import importlib
from pkgutil import extend_path

from ampctx_apex.install import also_called, at_uninstall

from ampctx.optimizers import (
    FusedAdagrad,
    FusedAdam,
    FusedLAMB,
    FusedMixedPrecisionLamb,
    FusedNovoGrad,
    FusedSGD,
)

__path__ = extend_path(__path__, __name__)

from ..contrib.optimizers import FP16_Optimizer

# Programs' subclasses call self.multi_tensor_adam in a step of their own.
_KERNELS = {
    FusedAdam: ("multi_tensor_adam", "multi_tensor_adam_capturable", "multi_tensor_adam_capturable_master"),
    FusedSGD: ("multi_tensor_sgd",),
    FusedLAMB: ("multi_tensor_l2norm", "multi_tensor_lamb"),
    FusedNovoGrad: ("multi_tensor_novograd",),
    FusedAdagrad: ("multi_tensor_adagrad",),
}


def _add_kernels() -> None:
    amp_C = importlib.import_module("amp_C")
    for kind, names in _KERNELS.items():
        for name in names:
            setattr(kind, name, staticmethod(getattr(amp_C, name)))
            at_uninstall(functools.partial(delattr, kind, name))
    for name in _KERNELS[FusedLAMB]:
        setattr(FusedMixedPrecisionLamb, name, staticmethod(getattr(amp_C, f"{name}_mp")))
        at_uninstall(functools.partial(delattr, FusedMixedPrecisionLamb, name))


_add_kernels()
also_called(
    __name__,
    "fp16_optimizer",
    "fused_adagrad",
    "fused_adam",
    "fused_lamb",
    "fused_mixed_precision_lamb",
    "fused_novograd",
    "fused_sgd",
)


__all__ = [
    "FP16_Optimizer",
    "FusedAdagrad",
    "FusedAdam",
    "FusedLAMB",
    "FusedMixedPrecisionLamb",
    "FusedNovoGrad",
    "FusedSGD",
]
