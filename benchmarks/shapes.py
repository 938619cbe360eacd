"""Parameter shapes of the benchmarked models: size tables, no downloads and no forward pass."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, repeat

import torch
from torch import nn

Shape = tuple[int, ...]


def conv(n_in: int, n_out: int, kernel: int) -> Iterator[tuple[str, Shape]]:
    yield "weight", (n_out, n_in, kernel, kernel)
    yield "norm", (n_out,)


def resnet50() -> Iterator[tuple[str, Shape]]:
    """``(kind, shape)`` of each weight of ResNet-50 with 1000 classes, in the order of the network.

    ``"norm"`` stands for the weight and the bias of one BatchNorm; 161 parameters, 25,557,032 elements.
    """
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


def efficientnet_b7() -> Iterator[tuple[str, Shape]]:
    """711 parameters, 66,347,960 elements."""
    yield from conv(3, 64, 3)
    n_in = 64
    stages = (
        (1, 3, 32, 4),
        (6, 3, 48, 7),
        (6, 5, 80, 7),
        (6, 3, 160, 10),
        (6, 5, 224, 10),
        (6, 5, 384, 13),
        (6, 3, 640, 4),
    )
    for expand, kernel, n_out, blocks in stages:
        for _ in range(blocks):
            wide, narrow = expand * n_in, n_in // 4
            if expand > 1:
                yield from conv(n_in, wide, 1)
            yield from conv(1, wide, kernel)
            yield from (("weight", s) for s in ((narrow, wide, 1, 1), (narrow,), (wide, narrow, 1, 1), (wide,)))
            yield from conv(wide, n_out, 1)
            n_in = n_out
    yield from conv(n_in, 2560, 1)
    yield from (("weight", s) for s in ((1000, 2560), (1000,)))


def lora() -> Iterator[tuple[str, Shape]]:
    """1,100 tensors of 4,096 elements, as the adapters of a model of 7 billion."""
    return repeat(("weight", (16, 256)), 1100)


def bert_large() -> Iterator[tuple[str, Shape]]:
    """BERT-large with the heads of its pre-training: 398 parameters, 336,226,108 elements."""
    width, words = 1024, 30522

    def linear(n_in: int, n_out: int) -> Iterator[tuple[str, Shape]]:
        return (("weight", shape) for shape in ((n_out, n_in), (n_out,)))

    layer_norm = [("weight", (width,))] * 2
    yield from (("weight", (rows, width)) for rows in (words, 512, 2))
    yield from layer_norm
    for _ in range(24):
        for _ in range(4):
            yield from linear(width, width)
        yield from layer_norm
        yield from chain(linear(width, 4 * width), linear(4 * width, width), layer_norm)
    yield from chain(linear(width, width), linear(width, width), layer_norm)
    yield "weight", (words,)
    yield from linear(width, 2)


def gpt(layers: int, width: int, context: int, words: int) -> Iterator[tuple[str, Shape]]:
    """A GPT-2 whose output layer is its input embedding."""
    layer_norm = [("weight", (width,))] * 2
    yield from (("weight", (rows, width)) for rows in (words, context))
    for _ in range(layers):
        for shape in ((3 * width, width), (width, width)):
            if shape[0] == 3 * width:
                yield from layer_norm
            yield from (("weight", s) for s in (shape, shape[:1]))
        yield from layer_norm
        for shape in ((4 * width, width), (width, 4 * width)):
            yield from (("weight", s) for s in (shape, shape[:1]))
    yield from layer_norm


def gpt2_small() -> Iterator[tuple[str, Shape]]:
    """148 parameters, 124,439,808 elements."""
    return gpt(12, 768, 1024, 50257)


def gpt2_xl() -> Iterator[tuple[str, Shape]]:
    """580 parameters, 1,557,611,200 elements."""
    return gpt(48, 1600, 1024, 50257)


def tiny(tensors: int) -> Iterator[tuple[str, Shape]]:
    """Tensors of 1 to 4,096 elements, three in four not a multiple of 4: what a call costs per tensor."""
    sizes = random.Random(0)
    for _ in range(tensors):
        yield "weight", (sizes.randint(1, 4096),)


def digits() -> Iterator[tuple[str, Shape]]:
    """The demo's model: 8 tensors, 6,138 elements. For trying the benchmarks out."""
    yield "weight", (16, 1, 3, 3)
    yield "norm", (16,)
    yield "weight", (32, 16, 3, 3)
    yield "norm", (32,)
    yield "weight", (10, 128)
    yield "weight", (10,)


MODELS: dict[str, Callable[[], Iterator[tuple[str, Shape]]]] = {
    "resnet50": resnet50,
    "bert-large": bert_large,
    "gpt2-small": gpt2_small,
    "gpt2-xl": gpt2_xl,
    "efficientnet-b7": efficientnet_b7,
    "lora": lora,
    **{f"tiny{tensors}": partial(tiny, tensors) for tensors in (161, 1000, 5000, 20000)},
    "digits": digits,
}


def one_element(tensors: int) -> Iterator[tuple[str, Shape]]:
    """Tensors of one element: what is left of a call's time is what it takes on the host."""
    return repeat(("weight", (1,)), tensors)


def shapes(name: str) -> list[Shape]:
    """The shape of each parameter of a model."""
    return [shape for kind, shape in MODELS[name]() for _ in range(2 if kind == "norm" else 1)]


class Parameters(nn.Module):
    """A module with the parameters of a table and nothing else; BatchNorms are real, so that O2 keeps them in fp32."""

    def __init__(self, table: Iterator[tuple[str, Shape]]) -> None:
        super().__init__()
        for i, (kind, shape) in enumerate(table):
            if kind == "norm":
                self.add_module(f"norm{i}", nn.BatchNorm2d(shape[0]))
            else:
                self.add_module(f"weight{i}", _Weight(shape))


class _Weight(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape) * 0.02)
