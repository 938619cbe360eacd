"""apex.amp.rnn_compat: what programs import of it."""


def has_old_rnns() -> bool:
    """Whether this is a torch before 1.0: False."""
    return False
