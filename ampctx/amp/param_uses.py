"""What code does with the parameters that it goes over, from its frame: a walk over weights is none over gradients."""

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
    READS = "reads their gradients, in the loop"
    OTHER = "something else in the loop, or it is torch's code or ours"
    UNKNOWN = "keeps them, in a list say"


# Generators of parameters, which are not who runs them.
_GIVE_PARAMETERS = ("parameters", "named_parameters", "_named_members", "master_params")
# Functions to Python 3.11 and earlier, or one expression of the function around it.
_INLINE = ("<listcomp>", "<setcomp>", "<dictcomp>", "<lambda>")


def use_of(frame: FrameType | None) -> Use:
    """What the first function from this frame outwards does that is no generator or comprehension."""
    reads = loops = False
    while frame is not None:
        code, module = frame.f_code, frame.f_globals.get("__name__") or ""
        if code.co_name not in _GIVE_PARAMETERS:
            is_loop, reads_there = _loop_at(code, frame.f_lasti)
            reads, loops = reads or reads_there, loops or is_loop
            if not (code.co_flags & inspect.CO_GENERATOR or code.co_name in _INLINE):
                if module == "ampctx.masters.clip":
                    return Use.CLIPS_BY_OURS
                if module == "torch.nn.utils.clip_grad" or code.co_name.startswith("clip_grad"):
                    return Use.CLIPS
                if module.partition(".")[0] in ("torch", "ampctx"):
                    return Use.OTHER
                return Use.READS if reads else Use.OTHER if loops else Use.UNKNOWN
        frame = frame.f_back
    return Use.UNKNOWN


@functools.lru_cache(maxsize=64)
def _loop_at(code: CodeType, place: int) -> tuple[bool, bool]:
    """Whether a loop asks its iterator for the next item here, and reads that one's ``.grad`` for more than zeroing."""
    instructions = list(dis.get_instructions(code))
    # What runs may be past the instruction itself, in the cache that follows it.
    i = max((i for i, step in enumerate(instructions) if step.offset <= place), default=-1)
    if i < 0 or instructions[i].opname != "FOR_ITER":
        return False, False
    end = instructions[i].argval
    body = list(itertools.takewhile(lambda step: step.offset < end, instructions[i + 1 :]))
    items = {_names(step)[0] for step in itertools.takewhile(_takes_item, body) if _names(step)}
    if body and body[0].opname.startswith("UNPACK") and "zip" in code.co_names:
        return True, False  # the gradient may be that of the other item, a master
    reads = any(
        step.opname in ("LOAD_ATTR", "LOAD_METHOD")
        and step.argval == "grad"
        and not items.isdisjoint(_names(before)[-1:])
        for before, step in itertools.pairwise(body)
    )
    zeroes = any((step.opname, step.argval) == ("STORE_ATTR", "grad") or step.argval == "zero_" for step in body)
    return True, reads and not zeroes


def _takes_item(step: dis.Instruction) -> bool:
    return step.opname.startswith(("STORE_FAST", "STORE_NAME", "STORE_DEREF", "STORE_GLOBAL", "UNPACK"))


def _names(step: dis.Instruction) -> tuple[str, ...]:
    """The variables of an instruction: two, where Python has made one instruction of two."""
    names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
    return tuple(name for name in names if isinstance(name, str))
