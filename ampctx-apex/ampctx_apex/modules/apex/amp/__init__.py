"""apex.amp: the functions of ``ampctx.amp``, and apex's private state as a view on its default session."""

# timm looks for these two in the module's __dict__, where the table's names are from their first use on.
from ampctx.amp import load_state_dict as load_state_dict
from ampctx.amp import state_dict as state_dict

from . import _initialize, amp, compat, frontend, handle, rnn_compat, scaler

# The instance, in place of the sub-module of the same name.
from ._amp_state import _amp_state
from ._stash import watch_default_session
from .amp import init
from .frontend import initialize as initialize

watch_default_session()

__all__ = ["_amp_state", "_initialize", "amp", "compat", "frontend", "handle", "init", "rnn_compat", "scaler"]
