"""Counts the host's reads of tensor values: each would be a wait for the device on an accelerator."""

import torch

# Private by name, and what torch's own tutorials use to watch operators; nothing public sees reads on the CPU.
from torch.utils._python_dispatch import TorchDispatchMode


class HostReads(TorchDispatchMode):
    """``with HostReads() as reads: ...``, then ``reads.count``."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))
