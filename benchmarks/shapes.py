"""Parameter shapes of the benchmarked models: size tables, no downloads and no forward pass."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from torch import nn

Shape = tuple[int, ...]


def resnet50() -> Iterator[tuple[str, Shape]]:
    """``(kind, shape)`` of each weight of ResNet-50 with 1000 classes, in the order of the network.

    ``"norm"`` stands for the weight and the bias of one BatchNorm; 161 parameters, 25,557,032 elements.
    """

    def conv(n_in: int, n_out: int, kernel: int) -> Iterator[tuple[str, Shape]]:
        yield "weight", (n_out, n_in, kernel, kernel)
        yield "norm", (n_out,)

    yield from conv(3, 64, 7)
    n_in = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            yield from conv(n_in, width, 1)
            yield from conv(width, width, 3)
            yield from conv(width, 4 * width, 1)
            if block == 0:
                yield from conv(n_in, 4 * width, 1)
            n_in = 4 * width
    yield "weight", (1000, n_in)
    yield "weight", (1000,)


def tiny5000() -> Iterator[tuple[str, Shape]]:
    """5000 tensors of 1,024 to 4,096 elements, three in four not a multiple of 4: what a call costs per tensor."""
    sizes = random.Random(0)
    for _ in range(5000):
        yield "weight", (sizes.randint(1024, 4096),)


def digits() -> Iterator[tuple[str, Shape]]:
    """The demo's model: 8 tensors, 6,138 elements. For trying the benchmarks out."""
    yield "weight", (16, 1, 3, 3)
    yield "norm", (16,)
    yield "weight", (32, 16, 3, 3)
    yield "norm", (32,)
    yield "weight", (10, 128)
    yield "weight", (10,)


MODELS = {"digits": digits, "resnet50": resnet50, "tiny5000": tiny5000}


class Parameters(nn.Module):
    """A module with the parameters of a table and nothing else; BatchNorms are real, so that O2 keeps them in fp32."""

    def __init__(self, name: str) -> None:
        super().__init__()
        for i, (kind, shape) in enumerate(MODELS[name]()):
            if kind == "norm":
                self.add_module(f"norm{i}", nn.BatchNorm2d(shape[0]))
            else:
                self.add_module(f"weight{i}", _Weight(shape))


class _Weight(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape) * 0.02)
