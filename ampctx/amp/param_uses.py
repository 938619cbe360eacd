"""What code does with the parameters that it goes over, from its frame: a walk over weights is none over gradients.

Where the code leaves a doubt, the walk counts as one over weights: a correct program must not be warned. The function
around a walk may have a ``.grad`` of something else, of inputs say, or ``torch.autograd.grad``.
"""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
from enum import Enum
from types import CodeType, FrameType


class Use(Enum):
    """What code does with the parameters that a generator gives it."""

    CLIPS = "clips their gradients"
    CLIPS_BY_OURS = "clips them with ampctx, which refuses model parameters by itself where it cannot"
    READS = "reads their gradients, in the loop over them"
    OTHER = "something else, or it is torch's code or ours"


# Generators of parameters, which are not who runs them.
_GIVE_PARAMETERS = ("parameters", "named_parameters", "_named_members", "master_params")
# Functions to Python 3.11 and earlier, or one expression of the function around it.
_INLINE = ("<listcomp>", "<setcomp>", "<dictcomp>", "<lambda>")


def use_of(frame: FrameType | None) -> Use:
    """What the first function from this frame outwards does that is no generator or comprehension."""
    reads = False
    while frame is not None:
        code, module = frame.f_code, frame.f_globals.get("__name__") or ""
        if code.co_name not in _GIVE_PARAMETERS:
            reads = reads or _reads_grads(code, frame.f_lasti)
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
def _reads_grads(code: CodeType, place: int) -> bool:
    """Whether a loop asks its iterator for the next item here, and reads that one's ``.grad`` for more than zeroing."""
    if "grad" not in code.co_names:
        return False
    steps = list(dis.get_instructions(code))
    # What runs may be past the instruction itself, in the cache that follows it.
    at = max((i for i, step in enumerate(steps) if step.offset <= place), default=-1)
    if at < 0 or steps[at].opname != "FOR_ITER":
        return False
    end = steps[at].argval
    body = list(itertools.takewhile(lambda step: step.offset < end, steps[at + 1 :]))
    if body and body[0].opname.startswith("UNPACK") and "zip" in code.co_names:
        return False  # the gradient may be that of the other item, a master
    items = {name for step in itertools.takewhile(_takes_item, body) for name in _stored(step)}
    pairs = list(itertools.pairwise(body))
    reads = any(step.argval == "grad" and not items.isdisjoint(_names(before)[-1:]) for before, step in pairs)
    return reads and not any((s.opname, s.argval) == ("STORE_ATTR", "grad") or s.argval == "zero_" for s in body)


def _takes_item(step: dis.Instruction) -> bool:
    return step.opname.startswith(("STORE_FAST", "STORE_NAME", "STORE_DEREF", "STORE_GLOBAL", "UNPACK"))


def _names(step: dis.Instruction) -> tuple[str, ...]:
    """The variables of an instruction: two, where Python has made one instruction of two."""
    names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
    return tuple(name for name in names if isinstance(name, str))


def _stored(step: dis.Instruction) -> tuple[str, ...]:
    return _names(step)[:1] if "LOAD" in step.opname else _names(step)
