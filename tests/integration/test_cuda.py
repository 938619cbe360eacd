"""The loop on a GPU."""

import pytest
import torch
from kit import OPTIMIZERS, start, train
from torch import nn

from ampctx.__main__ import main

pytestmark = pytest.mark.cuda


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 16),
        nn.LayerNorm(16),
        nn.Tanh(),
        nn.Linear(16, 3),
    )


def loss_of(model, step):
    """Of images of one of three stripes, with noise."""
    g = torch.Generator().manual_seed(step)
    labels = torch.randint(0, 3, (24,), generator=g)
    images = torch.randn(24, 1, 6, 6, generator=g) * 0.3
    images[torch.arange(24), :, labels * 2] += 1.0
    return nn.functional.cross_entropy(model(images.cuda()), labels.cuda())


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_trains_like_fp32(session, level):
    plain = make_model().cuda()
    expected = train(None, plain, OPTIMIZERS["AdamW-foreach"](plain.parameters()), 40, loss=loss_of, max_norm=100.0)
    model, optimizer = start(session, level, "AdamW-foreach", make_model().cuda())
    losses = train(session, model, optimizer, 40, loss=loss_of, max_norm=100.0)
    assert losses[0] == pytest.approx(expected[0], abs=0.15)
    assert sum(losses[-10:]) / 10 == pytest.approx(sum(expected[-10:]) / 10, abs=0.15)


def test_info_compares_the_ops_with_plain_torch(capsys):
    assert main(["info", "--test"]) == 0
    assert "test       on cuda:" in capsys.readouterr().out
