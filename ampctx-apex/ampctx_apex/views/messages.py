"""apex.amp's warnings and prints."""

from __future__ import annotations

import torch

from ampctx import AmpError
from ampctx.spi import session

# ``_amp_state.hard_override``: ``warn_or_err`` prints in place of raising.
hard_override = False


def warn_or_err(msg: str) -> None:
    """Raises AmpError (a RuntimeError); under ``_amp_state.hard_override`` it prints a warning."""
    if not hard_override:
        raise AmpError(msg)
    print("Warning:  " + msg)


def maybe_print(msg: str, rank0: bool = False) -> None:
    """Prints if verbosity > 0; with ``rank0`` only on rank 0."""
    dist = torch.distributed
    elsewhere = rank0 and dist.is_available() and dist.is_initialized() and dist.get_rank() > 0
    if session.verbosity > 0 and not elsewhere:
        print(msg)
