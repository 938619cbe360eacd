"""apex.optimizers: the classes of ``ampctx.optimizers``, with the kernels that apex's instances have as attributes."""

import functools
import importlib

from ampctx_apex.install import at_uninstall

from ampctx import optimizers

from ..contrib.optimizers import FP16_Optimizer

# Programs' subclasses call self.multi_tensor_adam in a step of their own.
_KERNELS = {
    optimizers.FusedAdam: ("multi_tensor_adam", "multi_tensor_adam_capturable", "multi_tensor_adam_capturable_master"),
    optimizers.FusedSGD: ("multi_tensor_sgd",),
    optimizers.FusedLAMB: ("multi_tensor_l2norm", "multi_tensor_lamb"),
    optimizers.FusedNovoGrad: ("multi_tensor_novograd",),
    optimizers.FusedAdagrad: ("multi_tensor_adagrad",),
}


def _add_kernels() -> None:
    amp_C = importlib.import_module("amp_C")
    for kind, names in _KERNELS.items():
        for name in names:
            setattr(kind, name, staticmethod(getattr(amp_C, name)))
            at_uninstall(functools.partial(delattr, kind, name))
    for name in _KERNELS[optimizers.FusedLAMB]:
        setattr(optimizers.FusedMixedPrecisionLamb, name, staticmethod(getattr(amp_C, f"{name}_mp")))
        at_uninstall(functools.partial(delattr, optimizers.FusedMixedPrecisionLamb, name))


_add_kernels()
