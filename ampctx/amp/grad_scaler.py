"""Where pickles of an earlier version look for ``GradScaler``."""

from ampctx.scaling.grad_scaler import GradScaler

__all__ = ["GradScaler"]
