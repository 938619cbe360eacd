"""apex.amp.handle: ``scale_loss``, and the handles on autocast."""

from ampctx_apex.views.handle import AmpHandle, NoOpHandle
from ampctx_apex.views.scaler import LossScaler
from ampctx_apex.views.wrapped import OptimWrapper

from ampctx.amp import disable_casts, master_params, scale_loss

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
