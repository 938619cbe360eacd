"""apex.amp.handle: ``scale_loss``, and the handles on autocast."""

from ampctx.amp import disable_casts, master_params, scale_loss
from ampctx.compat.views.handle import AmpHandle, NoOpHandle
from ampctx.compat.views.scaler import LossScaler
from ampctx.compat.views.wrapped import OptimWrapper

from ._amp_state import _amp_state, maybe_print

__all__ = [
    "AmpHandle",
    "LossScaler",
    "NoOpHandle",
    "OptimWrapper",
    "_amp_state",
    "disable_casts",
    "master_params",
    "maybe_print",
    "scale_loss",
]
