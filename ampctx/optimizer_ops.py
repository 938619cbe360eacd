"""The public name of ``ampctx.kernels.steps``."""

from ampctx.kernels.spec import SPECS
from ampctx.kernels.steps import *  # noqa: F403

__all__ = [*SPECS]
