"""apex.multi_tensor_apply: the applier of ``ampctx.multi_tensor_apply``."""

from ampctx_apex.install import also_called

from ampctx.multi_tensor_apply import MultiTensorApply, multi_tensor_applier

also_called(__name__, "multi_tensor_apply")

__all__ = ["MultiTensorApply", "multi_tensor_applier"]
