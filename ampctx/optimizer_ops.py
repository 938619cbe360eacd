"""The public name of ``ampctx.kernels.steps``."""

from ampctx.kernels.spec import SPECS  # noqa: F401
from ampctx.kernels.steps import *  # noqa: F403  # noqa: F401
