"""Small models and the steps that several tests take with them."""

import torch
from torch import nn

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
LOW = {"O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16}


def mlp(seed: int = 0, width: int = 8) -> nn.Sequential:
    """Linear, BatchNorm, Linear: 16-bit and fp32 parameters at O2."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 2))


def batch(seed: int = 0, n: int = 16) -> torch.Tensor:
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, seed: int = 0) -> torch.Tensor:
    return model(batch(seed)).float().square().mean()


def snapshot(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[torch.Tensor]:
    """Every weight, buffer and piece of optimizer state, as copies."""
    tensors = [*model.parameters(), *model.buffers()]
    for group in optimizer.param_groups:
        for p in group["params"]:
            tensors.append(p)
            tensors += [v for v in optimizer.state.get(p, {}).values() if isinstance(v, torch.Tensor)]
    return [t.detach().clone() for t in tensors]


def assert_unchanged(before: list[torch.Tensor], after: list[torch.Tensor]) -> None:
    assert len(before) == len(after)
    for a, b in zip(before, after, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
