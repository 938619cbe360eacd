"""ampctx runs apex.amp training scripts on current PyTorch, with compiled multi-tensor kernels.

``amp`` has the functions of apex.amp, ``optimizers`` the fused optimizers of apex, ``GradScaler`` the interface of
torch.amp. ``clip_grad_norm_`` clips without a host sync. ``python -m ampctx`` shows which kernels are in use.
"""

from typing import TYPE_CHECKING

from ampctx._version import __version__ as __version__
from ampctx._version import why_no_torch

if TYPE_CHECKING or not (_problem := why_no_torch()):
    from ampctx import amp, distributed, ops, optimizers
    from ampctx._errors import (
        AmpAssertionError,
        AmpAttributeError,
        AmpError,
        AmpIndexError,
        AmpKeyError,
        AmpNotImplementedError,
        AmpRankError,
        AmpStallError,
        AmpTypeError,
        AmpValueError,
        AmpWarning,
        ExtensionError,
    )
    from ampctx.amp import AmpSession, GradScaler
    from ampctx.weights.clip import clip_grad_norm_

if not TYPE_CHECKING:
    # Without torch the import itself succeeds: `ampctx --help` and `ampctx --version` need none.
    def __getattr__(name: str) -> None:
        if name in __all__:
            raise ImportError(_problem)
        if name in ("MultiTensorApply", "multi_tensor_applier", "multi_tensor_apply"):
            raise ImportError(f"ampctx.{name} is apex.multi_tensor_apply of ampctx-apex. Call the ops of ampctx.ops.")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "AmpAssertionError",
    "AmpAttributeError",
    "AmpError",
    "AmpIndexError",
    "AmpKeyError",
    "AmpNotImplementedError",
    "AmpRankError",
    "AmpSession",
    "AmpStallError",
    "AmpTypeError",
    "AmpValueError",
    "AmpWarning",
    "ExtensionError",
    "GradScaler",
    "amp",
    "clip_grad_norm_",
    "distributed",
    "ops",
    "optimizers",
]


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
