"""Modules under their former names, so that pickles of earlier versions find their classes."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from ampctx.amp.methods import StepOfCopy
from ampctx.casts import casting, model_watch
from ampctx.casts.autocast import ForwardHook
from ampctx.masters import params, state_dicts
from ampctx.scaling.grad_scaler import GradScaler
from ampctx.scaling.history import History
from ampctx.scaling.loss_scale import LossScale
from ampctx.scaling.outcome import Culprit, StepOutcome
from ampctx.scaling.scaler_state import fresh_optimizer_state

_CONTENTS: dict[str, dict[str, Any]] = {
    "autocast": {"_ForwardHook": ForwardHook},
    "casting": {name: getattr(casting, name) for name in ("_CastInputs", "_CastOutputs", "_UpcastEntries")},
    "grad_scaler": {"GradScaler": GradScaler, "_fresh_optimizer_state": fresh_optimizer_state},
    "kept_modules": {"_WithoutCasts": ForwardHook},
    "loss_scale": {"LossScale": LossScale},
    "master_params": {"_MastersFollow": state_dicts._MastersFollow},
    "model_watch": {"_RefuseReplaced": model_watch._RefuseReplaced},
    "replaced_methods": {"StepOfCopy": StepOfCopy},
    "step_history": {"History": History},
    "step_outcome": {"Culprit": Culprit, "StepOutcome": StepOutcome},
}
for _name, _contents in _CONTENTS.items():
    _module = ModuleType(f"ampctx.amp.{_name}", __doc__)
    vars(_module).update(_contents)
    sys.modules.setdefault(_module.__name__, _module)
vars(params).update(_CONTENTS["master_params"])
