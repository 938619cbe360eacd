"""Where pickles of an earlier version look for ``GradScaler``, and for what its states are made by."""

from ampctx.scaling.grad_scaler import GradScaler
from ampctx.scaling.scaler_state import fresh_optimizer_state as _fresh_optimizer_state

__all__ = ["GradScaler", "_fresh_optimizer_state"]
