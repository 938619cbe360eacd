"""The errors ampctx raises on purpose.

Each kind also derives from the built-in that a caller of apex.amp or torch.amp would catch in the same place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class AmpError(RuntimeError):
    """Something was asked for in the wrong order or in a state that cannot serve it."""


class AmpTypeError(AmpError, TypeError):
    """An argument has the wrong type."""


class AmpValueError(AmpError, ValueError):
    """An argument has the right type and a value that cannot be used."""


class AmpIndexError(AmpError, IndexError):
    """A loss id that ``num_losses`` does not cover."""


class AmpKeyError(AmpError, KeyError):
    """A checkpoint lacks a key, or carries one that has no place here."""

    # KeyError shows the repr of its argument; the message is meant to be read.
    __str__ = RuntimeError.__str__


class AmpAttributeError(AmpError, AttributeError):
    """What a call returned was taken for something else."""


class AmpAssertionError(AmpError, AssertionError):
    """A GradScaler call out of order, where torch.amp raises AssertionError."""


class AmpNotImplementedError(AmpError, NotImplementedError):
    """An op that is unsafe in 16 bits was called with 16-bit arguments."""


class AmpStallError(AmpError):
    """More steps in a row were skipped than ``max_consecutive_skips`` allows. Nothing was changed by any of them.

    Attributes:
        outcome: the ``StepOutcome`` of the latest.
        scale_history: pairs of loss id and scale after a skip, the latest 16 at most, as far as they were known.
    """

    def __init__(self, message: str, *, outcome: Any = None, scale_history: Sequence[tuple[int, float]] = ()) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.scale_history = list(scale_history)


class ExtensionError(AmpError, ImportError):
    """The compiled extension was required and cannot serve."""
