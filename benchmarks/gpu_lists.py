"""Lists of tensors for gpu_exercise.py: sizes around the edges of blocks and vectors, starts off their boundaries, and
memory around each tensor that nothing may read or write."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# Around nothing, a vector of 16 bytes, a warp, the 256 threads of a block, and the blocks of both backends.
EDGES = (0, 1, 7, 8, 9, 31, 33, 255, 256, 257, 511, 513, 2047, 2048, 2049)
TINY = (3, 1, 8, 0, 5, 9, 2)
# Elements that a tensor starts off its boundary, in the even and in the odd lists of a call: kernels go another way
# where lists differ. Four of them and 15 edges meet in all combinations.
OFFSETS = ((0, 0), (1, 1), (3, 3), (1, 0))
# Fewer tensors than this lie in memory of their own, where a sanitizer knows the end of each.
TOGETHER = 64
GUARD = 8  # elements at the least before each tensor of those that lie together


def sizes(count: int, turn: int) -> list[int]:
    """Of ``count`` tensors: edges, then tiny ones, then a large one, and none at the end. ``turn`` picks other edges
    where not all fit in."""
    few = max(0, count - 2)
    start = turn * few % len(EDGES)
    edges = (EDGES[start:] + EDGES[:start]) * len(OFFSETS)
    tiny = TINY * (few // len(TINY) + 1)
    large = 70001 if count < TOGETHER else 5000
    return [*edges[:few], *tiny[: max(0, few - len(edges))], large, 0][-count:]


def guard(dtype: torch.dtype) -> float:
    """What lies between tensors: a sum that reads it is nan."""
    return float("nan") if dtype.is_floating_point else 0x5A5A if dtype.itemsize > 1 else 0x5A


class TensorList:
    """``tensors`` with the values that they were made with; ``flat()`` has the values of now, end to end."""

    def __init__(self, layout: Layout, values: Tensor, odd: bool) -> None:
        self.layout, self.odd = layout, odd
        self.blocks = [torch.full((n,), guard(values.dtype), dtype=values.dtype, device=values.device)
                       for n in layout.block_sizes[odd]]  # fmt: skip
        if layout.together:
            self.blocks[0].index_copy_(0, layout.places[odd], values)
            self.tensors = list(self.blocks[0].split(layout.cuts[odd])[1::2])
        else:
            self.tensors = [b[offset[odd] :] for b, offset in zip(self.blocks, layout.offsets, strict=True)]
            for tensor, part in zip(self.tensors, values.split(layout.sizes), strict=True):
                tensor.copy_(part)

    def flat(self) -> Tensor:
        if self.layout.together:
            return self.blocks[0].index_select(0, self.layout.places[self.odd])
        return torch.cat(self.tensors)

    def is_intact(self) -> Tensor:
        """Whether all that lies around the tensors is as it was; a flag on the device."""
        if self.layout.together:
            around = self.blocks[0].index_select(0, self.layout.gaps[self.odd])
        else:
            starts = zip(self.blocks, self.layout.offsets, strict=True)
            around = torch.cat([block[: offset[self.odd]] for block, offset in starts])
        return (around.isnan() if around.is_floating_point() else around == guard(around.dtype)).all()


class Layout:
    """Where the tensors of the lists of a call lie: those of even and those of odd lists."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self.sizes, self.device, self.elements = list(sizes), device, sum(sizes)
        self.together = len(sizes) >= TOGETHER
        self.offsets = [OFFSETS[i % len(OFFSETS)] for i in range(len(sizes))]
        counts = torch.tensor(self.sizes)
        self.owner = torch.repeat_interleave(counts).to(device)  # the number of each element's tensor
        self.counts = counts.to(device)
        self.cuts, self.places, self.gaps, self.block_sizes = [], [], [], []
        for odd in (False, True):
            cuts = list(self._cuts(odd)) if self.together else []
            self.cuts.append(cuts)
            of_each = torch.tensor(cuts, dtype=torch.int64)
            is_tensor = torch.arange(len(cuts)) % 2 == 1
            belongs = torch.repeat_interleave(is_tensor, of_each) if cuts else torch.zeros(0, dtype=torch.bool)
            self.places.append(belongs.nonzero().flatten().to(device))
            self.gaps.append((~belongs).nonzero().flatten().to(device))
            self.block_sizes.append(
                [sum(cuts)] if self.together else [n + o[odd] for n, o in zip(self.sizes, self.offsets, strict=True)]
            )

    def _cuts(self, odd: bool) -> Iterator[int]:
        """The sizes of gap, tensor, gap, tensor, ..., gap."""
        place = 0
        for size, offset in zip(self.sizes, self.offsets, strict=True):
            gap = GUARD + (offset[odd] - place - GUARD) % 16
            yield gap
            yield size
            place += gap + size
        yield GUARD

    def make(self, values: Tensor, odd: bool = False) -> TensorList:
        return TensorList(self, values, odd)

    def full(self, value: float, dtype: torch.dtype, odd: bool = False) -> TensorList:
        return self.make(torch.full((self.elements,), value, dtype=dtype, device=self.device), odd)

    def norms(self, flat: Tensor) -> Tensor:
        """The norm of each tensor, from fp64."""
        sums = torch.zeros(len(self.sizes), dtype=torch.float64, device=self.device)
        return sums.index_add_(0, self.owner, flat.double().square()).sqrt()

    def largest(self, flat: Tensor) -> Tensor:
        """The largest magnitude of each tensor, 0 of one without elements."""
        found = torch.zeros(len(self.sizes), dtype=torch.float64, device=self.device)
        return found.scatter_reduce_(0, self.owner, flat.double().abs(), "amax")

    def spread(self, of_each: Tensor) -> Tensor:
        """A number of each tensor, for each of its elements."""
        return of_each.index_select(0, self.owner)


class Checks:
    """What is checked on the device, until ``settle`` waits for it."""

    def __init__(self) -> None:
        self.count = 0
        self.names: list[str] = []
        self.flags: list[Tensor] = []

    def add(self, name: str, flag: Tensor) -> None:
        self.names.append(name)
        self.flags.append(flag)

    def close(self, name: str, got: Tensor, want: Tensor, rtol: float, atol: float = 0.0) -> None:
        got, want = got.double(), want.double()
        self.add(name, ((got - want).abs() <= atol + rtol * want.abs()).all())

    def same(self, name: str, got: Tensor, want: Tensor) -> None:
        self.add(name, (got == want).all())

    def settle(self) -> None:
        """AssertionError that names what was wrong."""
        right = torch.stack(self.flags).tolist()
        wrong = [name for name, is_right in zip(self.names, right, strict=True) if not is_right]
        self.count += len(self.names)
        self.names, self.flags = [], []
        if wrong:
            raise AssertionError(f"{len(wrong)} checks failed: {'; '.join(wrong[:20])}")
