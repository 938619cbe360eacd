"""apex.parallel: torch's DistributedDataParallel and SyncBatchNorm under apex's signatures."""

from pkgutil import extend_path

from ampctx_apex.install import also_called

__path__ = extend_path(__path__, __name__)

from .distributed import DistributedDataParallel, Reducer
from .optimized_sync_batchnorm import SyncBatchNorm, convert_syncbn_model, create_syncbn_process_group

also_called(__name__, "sync_batchnorm")

__all__ = [
    "DistributedDataParallel", "Reducer", "SyncBatchNorm", "convert_syncbn_model", "create_syncbn_process_group",
]  # fmt: skip
