"""apex's names over ampctx. ``ampctx_apex.install_apex()`` puts this package under the name ``apex``."""

import warnings

import torch
from ampctx_apex.distribution import ApexDistribution as _Distribution

from ampctx.spi import is_rank_zero as _is_rank_zero

__version__ = _Distribution().version

from . import amp, fp16_utils, normalization, optimizers

if torch.distributed.is_available():
    from . import parallel


class DeprecatedFeatureWarning(FutureWarning):
    """The category of ``deprecated_warning``. ampctx deprecates no apex name."""


def deprecated_warning(msg: str) -> None:
    """Warns on rank 0."""
    if _is_rank_zero():
        warnings.warn(msg, DeprecatedFeatureWarning, stacklevel=3)


def check_cudnn_version_and_warn(global_option: str, required_cudnn_version: int) -> bool:
    """Whether cuDNN has at least this version, such as 8500; warns if not."""
    version = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    if version is not None and version >= required_cudnn_version:
        return True
    found = "cuDNN is not available" if version is None else f"this is {version}"
    warnings.warn(f"`{global_option}` needs cuDNN {required_cudnn_version} or later, and {found}", stacklevel=2)
    return False
