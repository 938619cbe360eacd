"""The models of the benchmarks: real ones with a batch for loop.py, and others of which only the weights count."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Bottleneck(nn.Module):
    def __init__(self, n_in: int, width: int, stride: int, widens: bool) -> None:
        super().__init__()
        n_out = 4 * width
        narrow = nn.Conv2d(n_in, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        middle = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        self.body = nn.Sequential(*narrow, *middle, nn.Conv2d(width, n_out, 1, bias=False), nn.BatchNorm2d(n_out))
        shortcut = (nn.Conv2d(n_in, n_out, 1, stride, bias=False), nn.BatchNorm2d(n_out)) if widens else ()
        self.shortcut = nn.Sequential(*shortcut)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def resnet50() -> nn.Module:
    """(batch, 3, height, width) -> (batch, 1000). 161 parameters, 25,557,032 elements."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    n_in = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            layers.append(Bottleneck(n_in, width, 2 if block == 0 and width > 64 else 1, block == 0))
            n_in = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(n_in, 1000))


def digits() -> nn.Module:
    """(batch, 1, 8, 8) -> (batch, 10). 8 parameters, 6,138 elements: the demo, and for trying the benchmarks out."""
    first = nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()
    second = nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()
    return nn.Sequential(*first, *second, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 10))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.qkv, self.proj = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm_2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm_1(x)).chunk(3, -1))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """(batch, time) -> (batch, words, time); the output layer is the embedding of the input."""

    def __init__(self, layers: int, width: int, heads: int, context: int, words: int) -> None:
        super().__init__()
        self.word, self.position = nn.Embedding(words, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, words: Tensor) -> Tensor:
        x = self.word(words) + self.position.weight[: words.shape[1]]
        return F.linear(self.norm(self.blocks(x)), self.word.weight).transpose(1, 2)


@dataclass(frozen=True)
class Network:
    """``batch`` makes inputs and targets of a cross entropy, on the CPU."""

    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]


def _images(n: int, channels: int, size: int, classes: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, channels, size, size), torch.randint(classes, (n,))


def _text(n: int, length: int, words: int) -> tuple[Tensor, Tensor]:
    text = torch.randint(words, (n, length + 1))
    return text[:, :-1], text[:, 1:]


NETWORKS = {
    "gpt-small": Network(lambda: GPT(4, 256, 8, 64, 512), lambda: _text(2, 16, 512)),
    "resnet50": Network(resnet50, lambda: _images(8, 3, 64, 1000)),
    "digits": Network(digits, lambda: _images(8, 1, 8, 10)),
}


# --- weights alone: no forward ----------------------------------------------------------------------------------------


def weights(shapes: Iterable[tuple[int, ...]]) -> nn.Module:
    return nn.ParameterList(nn.Parameter(torch.randn(shape) * 0.02) for shape in shapes)


def tiny(tensors: int) -> nn.Module:
    """Tensors of 1 to 4,096 elements, three in four not a multiple of 4: what a call costs per tensor."""
    sizes = random.Random(0)
    return weights((sizes.randint(1, 4096),) for _ in range(tensors))


def efficientnet_b7() -> nn.Module:
    """711 parameters, 66,347,960 elements."""

    def conv(n_in: int, n_out: int, kernel: int) -> tuple[nn.Module, ...]:
        return nn.Conv2d(n_in, n_out, kernel, bias=False), nn.BatchNorm2d(n_out)

    layers, n_in = [*conv(3, 64, 3)], 64
    stages = (
        (1, 3, 32, 4), (6, 3, 48, 7), (6, 5, 80, 7), (6, 3, 160, 10), (6, 5, 224, 10), (6, 5, 384, 13), (6, 3, 640, 4),
    )  # fmt: skip
    for expand, kernel, n_out, blocks in stages:
        for _ in range(blocks):
            wide, narrow = expand * n_in, n_in // 4
            if expand > 1:
                layers += conv(n_in, wide, 1)
            layers += conv(1, wide, kernel)
            layers += nn.Conv2d(wide, narrow, 1), nn.Conv2d(narrow, wide, 1)
            layers += conv(wide, n_out, 1)
            n_in = n_out
    return nn.Sequential(*layers, *conv(n_in, 2560, 1), nn.Linear(2560, 1000))


def bert_large() -> nn.Module:
    """BERT-large with the heads of its pre-training: 398 parameters, 336,226,108 elements."""
    width, words = 1024, 30522

    def linear(*sizes: int) -> list[nn.Module]:
        """Linear layers one after the other, and the norm of what comes out."""
        return [*(nn.Linear(a, b) for a, b in pairwise(sizes)), nn.LayerNorm(sizes[-1])]

    layers = [*(nn.Embedding(rows, width) for rows in (words, 512, 2)), nn.LayerNorm(width)]
    for _ in range(24):
        layers += linear(*[width] * 5) + linear(width, 4 * width, width)
    return nn.Sequential(*layers, *linear(*[width] * 3), weights([(words,)]), nn.Linear(width, 2))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet50": resnet50,
    "bert-large": bert_large,
    "gpt2-small": lambda: GPT(12, 768, 12, 1024, 50257),  # 148 parameters, 124,439,808 elements
    "efficientnet-b7": efficientnet_b7,
    "lora": lambda: weights([(16, 256)] * 1100),  # as the adapters of a model of 7 billion
    **{f"tiny{tensors}": partial(tiny, tensors) for tensors in (161, 1000, 5000, 20000)},
    "digits": digits,
}


def shapes(name: str) -> list[torch.Size]:
    """The shape of each parameter of a model."""
    with torch.device("meta"):
        return [p.shape for p in MODELS[name]().parameters()]
