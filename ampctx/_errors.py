"""The errors of ampctx, which also derive from what apex.amp or torch.amp raises in their place, and its warning."""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Iterable, Sequence
from typing import Any


def listed(items: Iterable[Any], most: int = 3) -> str:
    """The first ``most`` items in a line, and the number of others, for messages."""
    found = list(map(str, items))
    return ", ".join(found[:most]) + (f" and {len(found) - most} more" if len(found) > most else "")


class AmpError(RuntimeError):
    """A call in the wrong order, or in a state that does not allow it. The base of all errors of ampctx."""


class AmpTypeError(AmpError, TypeError):
    """An argument has the wrong type."""


def unexpected(call: str, name: str, known: Iterable[str]) -> AmpTypeError:
    """The error for a keyword that a call does not take, with the nearest that it takes."""
    near = difflib.get_close_matches(name, sorted(known), 2)
    hint = f". Did you mean {' or '.join(near)}?" if near else ""
    if name == "offload":
        hint = f". Write Offloaded({call.partition('.')[0]}, params, ...): see `ampctx explain offload`."
    return AmpTypeError(f"{call}() got an unexpected keyword argument {name!r}{hint}")


class AmpValueError(AmpError, ValueError):
    """An argument has the right type and an invalid value."""


class AmpIndexError(AmpError, IndexError):
    """A loss id that ``num_losses`` does not cover."""


class AmpKeyError(AmpError, KeyError):
    """A checkpoint lacks a key, or has an unknown one."""

    # KeyError would show the repr of the message.
    __str__ = RuntimeError.__str__


class AmpAttributeError(AmpError, AttributeError):
    """A return value was used in the wrong way, such as the pair of ``amp.initialize`` as a model."""


class AmpAssertionError(AmpError, AssertionError):
    """A GradScaler call out of order, where torch.amp raises AssertionError."""


class AmpNotImplementedError(AmpError, NotImplementedError):
    """An op that is unsafe in 16 bits was called with 16-bit arguments."""


class AmpStallError(AmpError):
    """More steps in a row were skipped than ``max_consecutive_skips`` allows. None of them changed a weight.

    Attributes:
        outcome: the ``StepOutcome`` of the latest step.
        scale_history: (loss id, scale after a skip) of the latest skips, at most 16.
    """

    def __init__(self, message: str, *, outcome: Any = None, scale_history: Sequence[tuple[int, float]] = ()) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.scale_history = list(scale_history)


class AmpRankError(AmpError):
    """Ranks of a process group disagree, or one of them left a collective out that ampctx makes."""


class ExtensionError(AmpError, ImportError):
    """``AMPCTX_REQUIRE_EXTENSION`` requires the compiled extension, and it is missing or unusable."""


class AmpWarning(UserWarning):
    """A likely mistake in the program. amp warns of those in a loop once a run, on rank 0, and not at ``verbosity=0``.

    ``warnings.simplefilter("error", ampctx.AmpWarning)`` makes it an error, as does ``-W error::ampctx.AmpWarning`` of
    pytest: then end the run on every rank, as others wait for the one that raised. Python's own ``-W`` imports no
    categories of packages. Skipped steps are no mistakes: they go to the log.
    """


def warn(message: str) -> None:
    """Warns at the line of the program that led here, through ampctx and torch."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _ON_THE_WAY:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, AmpWarning, stacklevel=level + 1)


_ON_THE_WAY = ("ampctx", "ampctx_apex", "apex", "torch", "contextlib")
