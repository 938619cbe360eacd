"""Sends fp32 bit patterns through the "split" write back of a step that changes no weight, and compares the bits.

    python benchmarks/split_exact.py [N]      N: only every Nth pattern

A number comes back with every bit, a NaN as a NaN of its sign, the bf16 half alone being one. Ends at the first other.
"""

import sys

import torch
from torch import Tensor, nn

from ampctx.kernels.reference_steps import join, split
from ampctx.optimizers import FusedSGD

BLOCK = 2**22


def came_back(patterns: Tensor) -> Tensor:
    """Whether each of these int32 patterns does."""
    p = nn.Parameter(split(patterns.view(torch.float32))[0])
    optimizer = FusedSGD([p], lr=0.0, master_weights="split")
    optimizer.state[p]["remainder"] = split(patterns.view(torch.float32))[1]
    p.grad = torch.zeros_like(p)
    optimizer.step()
    found = join(p.detach(), optimizer.state[p]["remainder"])
    as_nan = found.isnan() & p.isnan() & ((found.view(torch.int32) ^ patterns) >= 0)
    return torch.where(patterns.view(torch.float32).isnan(), as_nan, found.view(torch.int32) == patterns)


if (every := int((sys.argv[1:] or [1])[0])) < 1:
    sys.exit(f"{every} is not positive")
count = 0
for first in range(-(2**31), 2**31, BLOCK * every):
    patterns = torch.arange(first, min(first + BLOCK * every, 2**31), every).to(torch.int32)
    if not (fits := came_back(patterns)).all():
        sys.exit(f"{patterns[~fits][0].item() & 0xFFFFFFFF:08x} came back otherwise")
    count += len(patterns)
print(f"{count} patterns came back")
