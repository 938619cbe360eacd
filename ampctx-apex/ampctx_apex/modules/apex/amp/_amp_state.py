"""apex.amp._amp_state: apex's global state.

``_amp_state``, the instance, takes the place of this module among the attributes of ``apex.amp``, as in apex.
"""

from ampctx_apex.views.messages import maybe_print, warn_or_err
from ampctx_apex.views.state import AmpState, _amp_state

from ampctx.amp import master_params

__all__ = ["AmpState", "_amp_state", "master_params", "maybe_print", "warn_or_err"]
