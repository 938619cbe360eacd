"""The model and data that the clients train, and the loop that their results are compared with."""

from collections.abc import Callable, Iterable

import kit
import pytest
import torch
from torch import Tensor, nn

from ampctx import amp

Batch = tuple[Tensor, Tensor]
on_levels = pytest.mark.parametrize("level", ["O1", "O2"])
FIRST_SCALE = 2.0**16
LR = 0.1


def mlp() -> nn.Sequential:
    return kit.mlp(width=16)


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)


def batches(count: int, overflow_at: int | None = None) -> list[Batch]:
    """Batches of a linear rule that ``mlp`` learns. A target of the one with index ``overflow_at`` is inf."""
    generator = torch.Generator().manual_seed(1)
    rule = torch.randn(4, 2, generator=generator)
    inputs = [torch.randn(8, 4, generator=generator) for _ in range(count)]
    result = [(x, x @ rule) for x in inputs]
    if overflow_at is not None:
        result[overflow_at][1][0, 0] = torch.inf
    return result


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Small enough for gradients that fit into fp16 at the first scale."""
    return nn.functional.mse_loss(output.float(), target) / 10


def by_hand(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Iterable[Batch],
    level: str,
    max_norm: float | None = None,
    accumulate: int = 1,
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor] = lambda model, x, y: loss_of(model(x), y),
) -> tuple[list[float], dict[str, Tensor]]:
    """What a client's loop comes down to, written with ``ampctx.amp``: the losses, and the weights after it.

    Ends with ``amp.reset``.
    """
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    model.train()
    losses = []
    for i, (x, y) in enumerate(data, 1):
        value = loss(model, x, y) / accumulate
        with amp.scale_loss(value, optimizer) as scaled_loss:
            scaled_loss.backward()
        if i % accumulate == 0:
            if max_norm is not None:
                nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(value.item() * accumulate)
    after = weights(model)
    amp.reset()
    return losses, after


def assert_the_second_is_skipped(scales: list[float], steps: list[list[Tensor]]) -> None:
    """Scales and parameters after each of four steps, with an overflow in the second."""
    assert scales == [FIRST_SCALE] + 3 * [FIRST_SCALE / 2]
    assert all(torch.equal(a, b) for a, b in zip(steps[0], steps[1], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(steps[1], steps[2], strict=True))


def scale() -> float:
    return amp.state_dict()["loss_scaler0"]["loss_scale"]


def weights(model: nn.Module) -> dict[str, Tensor]:
    """What the model computes with, as its state dict names it: that one shows masters while the optimizer lives."""
    held = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    return {name: held[name].detach().to(entry.dtype, copy=True) for name, entry in model.state_dict().items()}


def assert_same_weights(model: nn.Module, expected: dict[str, Tensor]) -> None:
    actual = weights(model)
    assert list(actual) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name
