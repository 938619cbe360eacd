"""apex.amp.scaler: ``LossScaler``, and unscaling tensor by tensor."""

from ampctx_apex.views.scaler import LossScaler, axpby_check_overflow_python, scale_check_overflow_python

from ampctx.multi_tensor_apply import multi_tensor_applier

from ._amp_state import _amp_state, master_params, maybe_print

__all__ = [
    "LossScaler",
    "_amp_state",
    "axpby_check_overflow_python",
    "master_params",
    "maybe_print",
    "multi_tensor_applier",
    "scale_check_overflow_python",
]
