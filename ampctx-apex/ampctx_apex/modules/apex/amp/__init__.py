"""apex.amp: the functions of ``ampctx.amp``, and apex's private state as a view on its default session."""

from pkgutil import extend_path

from ampctx_apex.views.stash import watch_default_session

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

__path__ = extend_path(__path__, __name__)

from . import __version__ as __version__
from . import (
    _initialize,
    _process_optimizer,
    amp,
    compat,
    frontend,
    handle,
    lists,
    opt,
    rnn_compat,
    scaler,
    utils,
    wrap,
)

# The instance, in place of the sub-module of the same name.
from ._amp_state import _amp_state
from .amp import init

watch_default_session()

__all__ = [
    "_amp_state",
    "_initialize",
    "_process_optimizer",
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
    "lists",
    "load_state_dict",
    "master_params",
    "opt",
    "promote_function",
    "register_bfloat16_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "rnn_compat",
    "scale_loss",
    "scaler",
    "state_dict",
    "utils",
    "wrap",
]
