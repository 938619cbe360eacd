"""fused_layer_norm_cuda: layer norm and RMS norm with their statistics, on any device. No gradient flows through.

``apex.normalization`` has the layers. See ``ampctx_apex.kernels_norms`` for the arguments.
"""

from ampctx_apex.kernels_norms import *  # noqa: F403
from ampctx_apex.kernels_norms import __all__  # noqa: F401
