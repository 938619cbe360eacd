"""The public name of ``ampctx.kernels.ops`` and ``ampctx.kernels.handles``."""

from ampctx.kernels.handles import (  # noqa: F401
    HeldTensors,
    ReadTensors,
    extension,
    read,
    read_along,
    read_grads,
)
from ampctx.kernels.ops import (  # noqa: F401
    multi_tensor_axpby,
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_unscale_l2norm,
    update_scale,
)
