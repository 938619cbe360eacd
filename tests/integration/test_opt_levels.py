"""Whole training runs: every opt level against the same run in plain fp32."""

import functools

import pytest
import torch
from kit import OPTIMIZERS, every_level, start, train
from torch import nn


def make_model(seed=0):
    torch.manual_seed(seed)
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


def data(step, n=24):
    """Images of one of three stripes, with noise."""
    g = torch.Generator().manual_seed(step)
    labels = torch.randint(0, 3, (n,), generator=g)
    images = torch.randn(n, 1, 6, 6, generator=g) * 0.3
    images[torch.arange(n), :, labels * 2] += 1.0
    return images, labels


def loss_of(model, step):
    images, labels = (t.to(next(model.parameters()).device) for t in data(step))
    return nn.functional.cross_entropy(model(images), labels)


def losses_of(session, level, make, steps, max_norm=None, device="cpu"):
    """Of a run under amp, or without it where ``session`` is None."""
    model = make_model().to(device)
    make = functools.partial(OPTIMIZERS[make], **OPTIONS.get(make, {}))
    if session is None:
        return train(None, model, make(model.parameters()), steps, loss=loss_of, max_norm=max_norm)
    model, optimizer = start(session, level, make, model)
    return train(session, model, optimizer, steps, loss=loss_of, max_norm=max_norm)


# Learning rates that suit the model.
OPTIONS = {
    "FusedAdam": {"weight_decay": 0.01},
    "FusedSGD": {"lr": 0.05, "nesterov": True},
    "FusedLAMB": {"lr": 0.02},
    "FusedMixedPrecisionLamb": {"lr": 0.02},
    "FusedNovoGrad": {"lr": 0.3, "weight_decay": 0.001},
    "FusedAdagrad": {"lr": 0.05},
    "FusedLion": {"lr": 0.003},
    "LARC": {"lr": 0.3},
}


@pytest.mark.full(but=24)
@pytest.mark.parametrize("max_norm", [None, 0.5], ids=["", "clipped"])
@pytest.mark.parametrize("make", ["SGD-foreach", "Adam-foreach", "AdamW-fused", *OPTIONS])
@every_level
def test_trains_like_fp32(session, level, make, max_norm):
    expected = losses_of(None, level, make, 60, max_norm)
    losses = losses_of(session, level, make, 60, max_norm)
    assert expected[0] > 1.0
    assert sum(expected[-10:]) / 10 < 0.2
    if level == "O0":
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected))
    else:
        tolerance = {"O1": 0.03, "O2": 0.05, "O3": 0.05, "O4": 0.1, "O5": 0.15}[level]
        assert losses[0] == pytest.approx(expected[0], abs=tolerance)
        assert sum(losses[-10:]) / 10 == pytest.approx(sum(expected[-10:]) / 10, abs=tolerance)
