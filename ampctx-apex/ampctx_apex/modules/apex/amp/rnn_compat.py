"""apex.amp.rnn_compat: torch's autocast casts recurrent layers, so no torch function is replaced."""

from __future__ import annotations

from ampctx_apex.install import refused

RNN_NAMES = ["rnn_relu", "rnn_tanh", "gru", "lstm"]


def has_old_rnns() -> bool:
    """Whether this is a torch before 1.0: False."""
    return False


VariableFunctionsShim = refused("apex.amp.rnn_compat.VariableFunctionsShim")
whitelist_rnn_cells = refused("apex.amp.rnn_compat.whitelist_rnn_cells")

__all__ = ["RNN_NAMES", "VariableFunctionsShim", "has_old_rnns", "whitelist_rnn_cells"]
