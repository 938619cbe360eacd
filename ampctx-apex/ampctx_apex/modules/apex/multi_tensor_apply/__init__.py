"""apex.multi_tensor_apply: the applier of ``ampctx.multi_tensor_apply``."""

from ampctx_apex.install import also_called

also_called(__name__, "multi_tensor_apply")
