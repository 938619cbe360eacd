"""The public name of ``ampctx.kernels.ops``."""

from ampctx.kernels.ops import (  # noqa: F401
    extension,
    multi_tensor_axpby,
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_unscale_l2norm,
    update_scale,
)
