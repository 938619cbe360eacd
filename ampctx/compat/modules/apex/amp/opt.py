"""apex.amp.opt: the optimizer wrapper from before ``amp.initialize``."""

from ampctx.amp import master_params
from ampctx.compat.views.messages import maybe_print
from ampctx.compat.views.scaler import LossScaler
from ampctx.compat.views.wrapped import OptimWrapper

__all__ = ["LossScaler", "OptimWrapper", "master_params", "maybe_print"]
