"""Notices calls by the functions of torch.distributed.checkpoint.state_dict.

They name parameters by the model, which lacks amp's masters. Where an optimizer has no state yet, they make one by a
step of zeros with lr=0, which is not a step of the run.
"""

from __future__ import annotations

import sys

MODULE = "torch.distributed.checkpoint.state_dict"
# torch's function, its context managers, the wrappers of the replaced method and those of LR schedulers.
_DEPTH = 16


def is_calling() -> bool:
    """Whether a function of that module called the method that asks. A look at the stack: no hook tells it."""
    if MODULE not in sys.modules:
        return False
    frame = sys._getframe(1)
    for _ in range(_DEPTH):
        if frame is None or frame.f_globals.get("__name__") == MODULE:
            return frame is not None
        frame = frame.f_back  # type: ignore[assignment]
    return False
