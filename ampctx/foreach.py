"""The public name of ``ampctx.kernels.foreach``."""

from ampctx.kernels.foreach import (
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

__all__ = [
    "Factor",
    "FoundInf",
    "PerDevice",
    "axpby",
    "joined_norm",
    "l2norm",
    "move",
    "product",
    "scale",
    "unscale_l2norm",
    "unscale_l2norms",
]
