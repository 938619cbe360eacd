"""apex.parallel.sync_batchnorm, where apex had the same class without its kernels."""

from .optimized_sync_batchnorm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
