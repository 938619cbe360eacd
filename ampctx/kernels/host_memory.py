"""Host memory beside a device: what there is, buffers for tensors, and copies that the device does not wait for."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from ampctx.kernels.grouping import stacks

# Memory is pinned in blocks of this size: many small ones take minutes.
_BLOCK_BYTES = 2**28
_ALIGNMENT = 64


def available_bytes() -> int | None:
    """Host memory that can be allocated: what the kernel estimates, or less in a control group. None if unknown."""
    found = []
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found.append(1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]))
    with contextlib.suppress(OSError, StopIteration, ValueError):  # of "max", too
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        lines = (group / "memory.stat").read_text().splitlines()
        # Cached files do not count: the kernel drops them.
        cached = int(next(line for line in lines if line.startswith("inactive_file ")).split()[1])
        found.append(limit - used + cached)
    return min(found, default=None)


def buffers(params: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Host tensors of these dtypes laid out as the parameters, without values; pinned for those on a CUDA device."""
    kinds = [(dtype, p.is_cuda) for p, dtype in zip(params, dtypes, strict=True)]
    nbytes = (p.numel() * dtype.itemsize for p, dtype in zip(params, dtypes, strict=True))
    sizes = [-(-n // _ALIGNMENT) * _ALIGNMENT for n in nbytes]
    result: dict[int, Tensor] = {}
    for places in stacks(zip(kinds, sizes, strict=True), _BLOCK_BYTES):
        dtype, pinned = kinds[places[0]]
        starts = [0, *accumulate(sizes[i] // dtype.itemsize for i in places)]
        storage = torch.empty(starts.pop(), dtype=dtype, device="cpu", pin_memory=pinned).untyped_storage()
        for i, start in zip(places, starts, strict=True):
            # Of a dense tensor empty_like keeps the strides.
            like = torch.empty_like(params[i], device="meta", requires_grad=False)
            # Not a view, which would share its version with the others.
            result[i] = torch.empty(0, dtype=dtype, device="cpu").set_(storage, start, like.shape, like.stride())
    return [result[i] for i in range(len(params))]


class Lane:
    """Copies between a device and host memory: on a CUDA device on a stream of its own, elsewhere at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def follow_current(self) -> None:
        """Lets later copies come after the work of the current stream so far. No host sync."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, to: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            try:  # Private name: one call, for which torch has no public one. It refuses to write negated views.
                torch._foreach_copy_(list(to), list(sources), non_blocking=self._stream is not None)
            except RuntimeError:
                for t, source in zip(to, sources, strict=True):
                    t.copy_(source, non_blocking=self._stream is not None)

    def be_followed(self) -> None:
        """Lets later work of the current stream come after the copies so far. No host sync."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def finish(self) -> None:
        """Waits on the host for the copies."""
        if self._stream is not None:
            self._stream.synchronize()
