"""Real models for loop.py, with the parameters of the tables in shapes.py, and a batch for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Bottleneck(nn.Module):
    def __init__(self, n_in: int, width: int, stride: int, widens: bool) -> None:
        super().__init__()
        n_out = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(n_in, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, n_out, 1, bias=False),
            nn.BatchNorm2d(n_out),
        )
        shortcut = (nn.Conv2d(n_in, n_out, 1, stride, bias=False), nn.BatchNorm2d(n_out)) if widens else ()
        self.shortcut = nn.Sequential(*shortcut)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def resnet50() -> nn.Module:
    """(batch, 3, height, width) -> (batch, 1000)."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    n_in = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            layers.append(Bottleneck(n_in, width, 2 if block == 0 and width > 64 else 1, block == 0))
            n_in = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(n_in, 1000))


def digits() -> nn.Module:
    """(batch, 1, 8, 8) -> (batch, 10)."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


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
    "gpt2-xl": Network(lambda: GPT(48, 1600, 25, 1024, 50257), lambda: _text(2, 1024, 50257)),
    "resnet50": Network(resnet50, lambda: _images(8, 3, 64, 1000)),
    "digits": Network(digits, lambda: _images(8, 1, 8, 10)),
}
