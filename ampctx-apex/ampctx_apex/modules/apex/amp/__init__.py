"""apex.amp: the functions of ``ampctx.amp``, and apex's private state as a view on its default session."""

from ampctx.amp import (
    bfloat16_function,
    disable_casts,
    float_function,
    half_function,
    initialize,
    load_state_dict,
    master_params,
    promote_function,
    register_bfloat16_function,
    register_float_function,
    register_half_function,
    register_promote_function,
    scale_loss,
    state_dict,
)

from . import _initialize, amp, compat, frontend, handle, rnn_compat, scaler

# The instance, in place of the sub-module of the same name.
from ._amp_state import _amp_state
from ._stash import watch_default_session
from .amp import init

watch_default_session()

__all__ = [
    "_amp_state",
    "_initialize",
    "amp",
    "bfloat16_function",
    "compat",
    "disable_casts",
    "float_function",
    "frontend",
    "half_function",
    "handle",
    "init",
    "initialize",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_bfloat16_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "rnn_compat",
    "scale_loss",
    "scaler",
    "state_dict",
]
