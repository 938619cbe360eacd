"""apex.parallel: torch's DistributedDataParallel and SyncBatchNorm under apex's signatures."""

from .distributed import DistributedDataParallel, Reducer
from .optimized_sync_batchnorm import SyncBatchNorm, convert_syncbn_model, create_syncbn_process_group
