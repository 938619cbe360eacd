"""Writes through ``.data``, which change no version."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ampctx._decorators import arriving, host_may_read
from ampctx._errors import listed

_TENSORS, _ELEMENTS = 8, 2**14


class DataWrites:
    """Finds 16-bit weights that are not their rounded masters, although no version tells of a write.

    It reads a sample at the second to the fourth step, and at every 100th. No host sync: an answer on its way from a
    device waits for a later look.
    """

    def __init__(self) -> None:
        self._steps, self._is_over, self._answer = 0, False, tuple[Any, ...]()

    def is_due(self) -> bool:
        """Counts a step. Whether it looks. Not after a find."""
        self._steps += 1
        return (self._steps in (2, 3, 4) or self._steps % 100 == 0) and not self._is_over and host_may_read()

    def found(self, pairs: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """The weights of a sample of (weight, master) that differ: of this one, or of one before."""
        if not self._answer and pairs:
            step = len(pairs) // _TENSORS + 1
            sample, device = pairs[self._steps // 100 % step :: step], pairs[0][0].device
            differ = torch.stack([_differ(*pair).to(device, non_blocking=True) for pair in sample])
            self._answer = [p for p, _ in sample], *arriving(differ)
        if not self._answer or (self._answer[2] is not None and not self._answer[2].query()):
            return []
        (params, differ, _), self._answer = self._answer, ()
        found = [p for p, differs in zip(params, differ.tolist(), strict=True) if differs]
        self._is_over = bool(found)
        return found


def message(names: Iterable[str]) -> str:
    return (
        f"{listed(names)} was written through .data, of which no version tells. Its fp32 master overwrites it at the "
        "next step. Write the parameter itself under torch.no_grad(). See `ampctx explain was-written-through-data`."
    )


@torch.no_grad()
def _differ(p: Tensor, master: Tensor) -> Tensor:
    if p.dim():
        rows = max(1, _ELEMENTS * p.shape[0] // max(1, p.numel()))
        p, master = p[:rows], master[:rows]
    return ((master.to(p.dtype) != p) & (p == p)).any()  # nan equals nothing
