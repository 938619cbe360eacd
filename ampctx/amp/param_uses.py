"""What code does with the parameters that it goes over, by the names in it: a walk over weights is none over gradients.

Where the names leave a doubt, the walk counts as one over weights: a correct program must not be warned.
"""

from __future__ import annotations

import dis
import functools
import inspect
from enum import Enum
from types import CodeType, FrameType


class Use(Enum):
    """What code does with the parameters that a generator gives it."""

    CLIPS = "clips their gradients"
    CLIPS_BY_OURS = "clips them with ampctx, which refuses model parameters by itself where it cannot"
    READS = "reads .grad, perhaps of them"
    OTHER = "something else, or it is torch's code or ours"


# Generators of parameters, which are not who runs them.
_GIVE_PARAMETERS = ("parameters", "named_parameters", "_named_members", "master_params")
# Functions to Python 3.11 and earlier, or one expression of the function around it.
_INLINE = ("<listcomp>", "<setcomp>", "<dictcomp>", "<lambda>")


def use_of(frame: FrameType | None, masters: bool = False) -> Use:
    """What the first function from this frame outwards does that is no generator or comprehension.

    ``masters``: it goes over masters. In code over a model's parameters, ``master_params`` has the gradients.
    """
    reads = False
    while frame is not None:
        code, module = frame.f_code, frame.f_globals.get("__name__") or ""
        if code.co_name not in _GIVE_PARAMETERS:
            reads = reads or (_reads_grads(code) and (masters or "master_params" not in code.co_names))
            if not (code.co_flags & inspect.CO_GENERATOR or code.co_name in _INLINE):
                if module == "ampctx.masters.clip":
                    return Use.CLIPS_BY_OURS
                if module == "torch.nn.utils.clip_grad" or code.co_name.startswith("clip_grad"):
                    return Use.CLIPS
                if module.partition(".")[0] in ("torch", "ampctx"):
                    return Use.OTHER
                return Use.READS if reads else Use.OTHER
        frame = frame.f_back
    return Use.OTHER


@functools.lru_cache(maxsize=64)
def _reads_grads(code: CodeType) -> bool:
    """Whether there is a ``.grad`` in the code, for more than zeroing."""
    if "grad" not in code.co_names or "zero_" in code.co_names:
        return False
    return not any(step.opname == "STORE_ATTR" and step.argval == "grad" for step in dis.get_instructions(code))
