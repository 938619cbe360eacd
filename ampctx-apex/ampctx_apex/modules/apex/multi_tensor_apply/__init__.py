"""apex.multi_tensor_apply: the applier of ``ampctx.multi_tensor_apply``."""
