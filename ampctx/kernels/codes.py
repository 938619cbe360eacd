"""8-bit codes of optimizer state, in plain torch. The arithmetic of csrc/functors/codes.h, to the last bit.

A tensor is cut into blocks of 64 elements in memory order; the last may be shorter. Each block has one fp32 scale s.

    signed, int8       s = max|m|         y = 2 z / (1 + |z|) with z = m / s    q = floor(127 y + h)
    read               y = q / 127        m = (y / (2 - |y|)) s
    unsigned, uint8    s = max sqrt(v)    y = sqrt(sqrt(v) / s)                 q = floor(255 y + h), 1 or more if v > 0
    read               y = q / 255        r = y^2 s,  v = r^2

h is 1/2 to round to nearest, or random in [0, 1), which is right on average in y. A block of zeros has scale 0. A block
with inf or nan has scale nan, and reads as nan. Reading and storing to nearest again gives the same codes.

Sources of the two curves: the soft sign of FlashOptim for averages of gradients; for averages of squares, a fourth
root. An unsigned code is 0 only for 0, so that no update is divided by a value that was lost.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ampctx.kernels import reference

BLOCK = 64
DTYPES = {"signed": torch.int8, "unsigned": torch.uint8}


def blocks_of(numel: int) -> int:
    """How many scales ``numel`` elements have."""
    return -(-numel // BLOCK)


def root(x: Tensor) -> Tensor:
    """A correctly rounded root, as in the kernels. torch's fp32 root on the CPU may be off by one bit."""
    return x.to(reference.widest(x.device)).sqrt().to(x.dtype)


def in_memory_order(t: Tensor) -> Tensor:
    """The elements of a dense tensor as they lie in memory, 1-d, as a view; of another tensor, in their order."""
    return t.as_strided((t.numel(),), (1,)) if reference.is_dense(t) else t.reshape(-1)


def encode(values: Tensor, dtype: torch.dtype, h: Tensor | float = 0.5) -> tuple[Tensor, Tensor]:
    """Codes and scales of fp32 ``values``, 1-d in memory order. ``h``: one number, or one for each element."""
    blocks = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1) if values.numel() else values.new_empty(0)  # nan where one is
    scales = scales if dtype == torch.int8 else root(scales)
    scales = torch.where(torch.isfinite(scales), scales, torch.nan)
    per_element = scales.repeat_interleave(BLOCK)[: values.numel()]
    holds = per_element > 0
    divisor = torch.where(holds, per_element, 1.0)
    if dtype == torch.int8:
        z = torch.where(holds, values, 0.0) / divisor
        q = torch.floor(127.0 * ((z + z) / (1.0 + z.abs())) + h)
    else:
        v = torch.where(holds & (values > 0), values, 0.0)
        y = root(root(v) / divisor)
        q = torch.floor(255.0 * y + h).clamp(max=255.0)
        q = torch.where(v > 0, q.clamp(min=1.0), q)
    return q.to(dtype), scales


def _over(x: Tensor, number: float) -> Tensor:
    """``x / number``, rounded once: of a number, torch takes the reciprocal first on a GPU."""
    return x / x.new_full((), number)


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """The fp32 values of 1-d ``codes`` in memory order."""
    s = scales.reshape(-1).repeat_interleave(BLOCK)[: codes.numel()]
    if codes.dtype == torch.int8:
        y = _over(codes.float(), 127.0)
        return y / (2.0 - y.abs()) * s
    y = _over(codes.float(), 255.0)
    r = (y * y) * s
    return r * r
