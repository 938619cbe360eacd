"""Records the operators of a piece of Python and runs them again on the same tensors, as a CUDA graph does.

What the host decided while recording stays decided, and a value that it read stays what it was: code that replays right
takes its decisions on the device. The memory of intermediate results is kept, so that later tensors see new values.
"""

import torch

# Private by name, and what torch's own tutorials use to watch operators; nothing public sees what backward runs.
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Tape(TorchDispatchMode):
    """``with Tape() as tape: ...``, then ``tape.replay()`` as often as wanted."""

    def __init__(self):
        super().__init__()
        self._calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace == "profiler":  # nothing for a device to do
            return result
        # Lists are copied: callers may reuse them.
        args = tuple(list(a) if isinstance(a, list) else a for a in args)
        self._calls.append((func, args, kwargs or {}, result))
        return result

    @torch.no_grad()
    @torch.autocast("cpu", enabled=False)  # its casts are recorded
    def replay(self):
        for func, args, kwargs, result in self._calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if not isinstance(old, torch.Tensor):
                    assert old == new, f"{func} gave {old} while recording and {new} now: the host has read a value"
                elif old.data_ptr() != new.data_ptr():
                    old.copy_(new)
