"""Notices calls by torch.distributed.checkpoint, of which no hook tells.

The functions of its ``state_dict`` name parameters by the model, which lacks amp's masters. Where an optimizer has no
state yet, they make one by a step of zeros with lr=0, which is not a step of the run.
"""

from __future__ import annotations

import sys

MODULE = "torch.distributed.checkpoint.state_dict"
SAVER = "torch.distributed.checkpoint.state_dict_saver"
# torch's function, its context managers, the wrappers of the replaced method and those of LR schedulers.
_DEPTH = 16


def is_calling(module: str = MODULE) -> bool:
    """Whether a function of that module called the method that asks. A look at the stack."""
    frame = sys._getframe(1) if module in sys.modules else None
    for _ in range(_DEPTH):
        if frame is None or frame.f_globals.get("__name__") == module:
            return frame is not None
        frame = frame.f_back
    return False
