"""apex.amp: the functions of ``ampctx.amp``, and apex's private state as a view on its default session."""

from . import _initialize, amp, compat, frontend, handle, rnn_compat, scaler

# The instance, in place of the sub-module of the same name.
from ._amp_state import _amp_state
from ._stash import watch_default_session
from .amp import init

watch_default_session()

__all__ = ["_amp_state", "_initialize", "amp", "compat", "frontend", "handle", "init", "rnn_compat", "scaler"]
