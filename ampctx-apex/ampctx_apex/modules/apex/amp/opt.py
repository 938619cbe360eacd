"""apex.amp.opt: the optimizer wrapper from before ``amp.initialize``."""

from ampctx_apex.views.messages import maybe_print
from ampctx_apex.views.scaler import LossScaler
from ampctx_apex.views.wrapped import OptimWrapper

from ampctx.amp import master_params

__all__ = ["LossScaler", "OptimWrapper", "master_params", "maybe_print"]
