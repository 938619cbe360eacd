"""``from ampctx import amp``: apex.amp's functions, bound to one default session.

``AmpSession()`` has the same methods, for a second configuration in one process.
"""

from ampctx.amp.op_counts import CastCount, OpCount, OpReport
from ampctx.amp.options import OPT_LEVELS, PrecisionPolicy
from ampctx.amp.session import AmpSession
from ampctx.scaling.grad_scaler import GradScaler
from ampctx.scaling.outcome import Culprit, History, StepOutcome

_default_session = AmpSession()

initialize = _default_session.initialize
scale_loss = _default_session.scale_loss
master_params = _default_session.master_params
skipped_steps = _default_session.skipped_steps
outcome = _default_session.outcome
loss_scale = _default_session.loss_scale
history = _default_session.history
on_step = _default_session.on_step
on_skip = _default_session.on_skip
master_model = _default_session.master_model
master_state_dict = _default_session.master_state_dict
state_dict = _default_session.state_dict
check_ranks = _default_session.check_ranks
load_state_dict = _default_session.load_state_dict
disable_casts = _default_session.disable_casts
half_function = _default_session.half_function
bfloat16_function = _default_session.bfloat16_function
float_function = _default_session.float_function
promote_function = _default_session.promote_function
register_half_function = _default_session.register_half_function
register_bfloat16_function = _default_session.register_bfloat16_function
register_float_function = _default_session.register_float_function
register_promote_function = _default_session.register_promote_function
reset = _default_session.reset
get_state_dict = _default_session.get_state_dict
set_state_dict = _default_session.set_state_dict
Stateful = _default_session.Stateful
count_ops = _default_session.count_ops

__all__ = [
    "OPT_LEVELS",
    "AmpSession",
    "CastCount",
    "Culprit",
    "GradScaler",
    "History",
    "OpCount",
    "OpReport",
    "PrecisionPolicy",
    "Stateful",
    "StepOutcome",
    "bfloat16_function",
    "check_ranks",
    "count_ops",
    "disable_casts",
    "float_function",
    "get_state_dict",
    "half_function",
    "history",
    "initialize",
    "load_state_dict",
    "loss_scale",
    "master_model",
    "master_params",
    "master_state_dict",
    "on_skip",
    "on_step",
    "outcome",
    "promote_function",
    "register_bfloat16_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "reset",
    "scale_loss",
    "set_state_dict",
    "skipped_steps",
    "state_dict",
]


def __dir__() -> list[str]:
    return sorted(__all__)
