"""The public name of ``ampctx.kernels.foreach``."""

from ampctx.kernels.foreach import (  # noqa: F401
    Factor,
    FoundInf,
    PerDevice,
    axpby,
    joined_norm,
    l2norm,
    move,
    product,
    scale,
    unscale_l2norm,
    unscale_l2norms,
)
