"""Counts the host's reads of tensor values: each would be a wait for the device on an accelerator."""

from collections import Counter

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


class OpCalls(HostReads):
    """Counts calls of ampctx's ops too: ``with OpCalls() as calls: ...``, then ``calls.of["multi_tensor_scale"]``."""

    def __init__(self):
        super().__init__()
        self.of = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "ampctx":
            self.of[func._schema.name.partition("::")[2]] += 1
        return super().__torch_dispatch__(func, types, args, kwargs)

    @property
    def on_lists(self):
        """Calls that walk lists of tensors: all but update_scale, which touches single numbers."""
        return sum(n for name, n in self.of.items() if name.startswith("multi_tensor"))
