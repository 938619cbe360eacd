"""apex.multi_tensor_apply.multi_tensor_apply: where apex had the class."""

from ampctx.multi_tensor_apply import MultiTensorApply

__all__ = ["MultiTensorApply"]
