"""Finds out, from its frame, whether code that iterates over parameters clips or reads their gradients.

In doubt the loop counts as one over weights, because a correct program must not get a warning. The function around the
loop may read ``.grad`` of something else, such as inputs, or call ``torch.autograd.grad``.
"""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
from enum import Enum
from types import CodeType, FrameType


class Use(Enum):
    """How code uses the parameters that it iterates over."""

    CLIPS = "clips their gradients"
    CLIPS_BY_OURS = "clips them with ampctx.clip_grad_norm_, which refuses model parameters by itself"
    READS = "reads their gradients in the loop"
    OTHER = "anything else, and all code of torch or ampctx"


# Generators of parameters: their caller is the code to look at.
_GIVE_PARAMETERS = ("parameters", "named_parameters", "_named_members", "master_params")
# Functions of their own in Python 3.11 and earlier; later part of the function around them.
_INLINE = ("<listcomp>", "<setcomp>", "<dictcomp>", "<lambda>")


def use_of(frame: FrameType | None) -> Use:
    """The use in the first function, from this frame outwards, that is no generator or comprehension."""
    reads = False
    while frame is not None:
        code, module = frame.f_code, frame.f_globals.get("__name__") or ""
        if code.co_name not in _GIVE_PARAMETERS:
            reads = reads or _reads_grads(code, frame.f_lasti)
            if not (code.co_flags & inspect.CO_GENERATOR or code.co_name in _INLINE):
                if module == "ampctx.weights.clip":
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
    """Whether a loop fetches its next item here, and reads its ``.grad`` for more than zeroing."""
    if "grad" not in code.co_names:
        return False
    steps = list(dis.get_instructions(code))
    # ``place`` may be past the instruction, in the inline cache that follows it.
    at = max((i for i, step in enumerate(steps) if step.offset <= place), default=-1)
    if at < 0 or steps[at].opname != "FOR_ITER":
        return False
    end = steps[at].argval
    body = list(itertools.takewhile(lambda step: step.offset < end, steps[at + 1 :]))
    if body and body[0].opname.startswith("UNPACK") and "zip" in code.co_names:
        return False  # the gradient may belong to the other item, such as a master
    items = {name for step in itertools.takewhile(_takes_item, body) for name in _stored(step)}
    pairs = list(itertools.pairwise(body))
    reads = any(step.argval == "grad" and not items.isdisjoint(_names(before)[-1:]) for before, step in pairs)
    return reads and not any((s.opname, s.argval) == ("STORE_ATTR", "grad") or s.argval == "zero_" for s in body)


def _takes_item(step: dis.Instruction) -> bool:
    return step.opname.startswith(("STORE_FAST", "STORE_NAME", "STORE_DEREF", "STORE_GLOBAL", "UNPACK"))


def _names(step: dis.Instruction) -> tuple[str, ...]:
    """The variables of an instruction. Two if Python has merged two instructions into one."""
    names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
    return tuple(name for name in names if isinstance(name, str))


def _stored(step: dis.Instruction) -> tuple[str, ...]:
    return _names(step)[:1] if "LOAD" in step.opname else _names(step)
