"""apex.amp.frontend: ``initialize`` and its options."""

from collections import OrderedDict

import torch
from ampctx_apex.views.options import O0, O1, O2, O3, O4, O5, Properties

from ampctx.amp import initialize, load_state_dict, state_dict

from ._amp_state import _amp_state, maybe_print, warn_or_err

opt_levels = {"O3": O3(), "O2": O2(), "O1": O1(), "O0": O0(), "O4": O4(), "O5": O5()}

__all__ = [
    "O0",
    "O1",
    "O2",
    "O3",
    "O4",
    "O5",
    "OrderedDict",
    "Properties",
    "_amp_state",
    "initialize",
    "load_state_dict",
    "maybe_print",
    "opt_levels",
    "state_dict",
    "torch",
    "warn_or_err",
]
