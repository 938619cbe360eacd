"""A module whose parameters have odd sizes, layouts and types, and the same one in fp64, contiguous."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class OddModel(nn.Module):
    """Empty parameters first and last; channels_last, transposed, at an offset, with gaps, 0-d; fp64; complex64."""

    def __init__(self, with_gaps: bool = True, with_complex: bool = False, all_empty: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.randn(shape, dtype=dtype, generator=generator)

        self.first = nn.Parameter(torch.zeros(0, 3))
        if not all_empty:
            self.conv = nn.Parameter(randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
            self.turned = nn.Parameter(randn(5, 4).t())
            self.offset = nn.Parameter(randn(10)[3:8])
            self.scalar = nn.Parameter(randn())
            self.fp64 = nn.Parameter(randn(5, dtype=torch.float64) / 3)
            self.empty = nn.Parameter(torch.zeros(2, 0))
            if with_gaps:
                self.gaps = nn.Parameter(randn(8)[::2])
            if with_complex:
                self.cplx = nn.Parameter(randn(3, dtype=torch.complex64))
        self.register_buffer("running", torch.ones(2, dtype=torch.float64) / 3)
        self.last = nn.Parameter(torch.zeros(0))

    def exact(self) -> list[nn.Parameter]:
        """The parameters of now, widened and contiguous."""
        return [nn.Parameter(p.detach().to(wide(p)).contiguous().clone()) for p in self.parameters()]


def wide(t: Tensor) -> torch.dtype:
    return torch.complex128 if t.is_complex() else torch.float64


def gradients(model: nn.Module, seed: int) -> list[Tensor]:
    """One for each parameter, in fp64: multiples of 1/8 up to 1, which every type holds, times any loss scale too."""
    generator = torch.Generator().manual_seed(seed)

    def eighths(shape: torch.Size) -> Tensor:
        return torch.randint(-8, 9, shape, generator=generator).double() / 8

    return [torch.complex(eighths(p.shape), eighths(p.shape)) if p.is_complex() else eighths(p.shape)
            for p in model.parameters()]  # fmt: skip


def loss_of(parameters: list[Tensor], wanted: list[Tensor]) -> Tensor:
    """A loss with these gradients."""
    return torch.stack([(p.to(wide(p)) * g.conj()).sum().real for p, g in zip(parameters, wanted, strict=True)]).sum()
