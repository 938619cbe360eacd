"""apex.multi_tensor_apply: the applier of ``ampctx.multi_tensor_apply``."""

from pkgutil import extend_path

from ampctx.multi_tensor_apply import multi_tensor_applier

from .multi_tensor_apply import MultiTensorApply

__path__ = extend_path(__path__, __name__)

# ROCm's apex has two, of different chunk sizes.
multi_tensor_applier_l2norm = MultiTensorApply(2048 * 32)

__all__ = ["MultiTensorApply", "multi_tensor_applier", "multi_tensor_applier_l2norm"]
