"""Whole training runs: every opt level against the same run in plain fp32."""

import pytest
import torch
from kit import backward
from torch import nn

from ampctx import amp, clip_grad_norm_


@pytest.fixture(autouse=True)
def _clean():
    yield
    amp.reset()


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


def train_plain(steps, make_optimizer, max_norm=None):
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    losses = []
    for step in range(steps):
        images, labels = data(step)
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        if max_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def train_amp(level, steps, make_optimizer, max_norm=None, **kwargs):
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **kwargs)
    losses = []
    for step in range(steps):
        images, labels = data(step)
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        backward(amp, loss, optimizer)
        if max_norm:
            clip_grad_norm_(amp.master_params(optimizer), max_norm)
        optimizer.step()
        losses.append(loss.item())
    return model, optimizer, losses


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


@pytest.mark.full(but=16)
@pytest.mark.parametrize("max_norm", [None, 0.5], ids=["", "clipped"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_trains_like_fp32(level, optimizer, max_norm):
    _, expected = train_plain(60, OPTIMIZERS[optimizer], max_norm)
    _, _, losses = train_amp(level, 60, OPTIMIZERS[optimizer], max_norm)
    assert expected[0] > 1.0
    assert sum(expected[-10:]) / 10 < 0.2
    if level == "O0":
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected))
    else:
        tolerance = {"O1": 0.03, "O2": 0.05, "O4": 0.1, "O5": 0.15}[level]
        assert losses[0] == pytest.approx(expected[0], abs=tolerance)
        assert sum(losses[-10:]) / 10 == pytest.approx(sum(expected[-10:]) / 10, abs=tolerance)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_dynamic_scale_settles(level):
    """Starting far too high, the run loses a few steps and then trains."""
    model = make_model()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0**24, "unskipped": 0}})
    losses = []
    for step in range(60):
        images, labels = data(step)
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        backward(amp, loss, optimizer)
        optimizer.step()
        losses.append(loss.item())
    skipped = amp.skipped_steps(optimizer)
    assert 0 < skipped < 20
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 2.0 ** (24 - skipped)
    assert sum(losses[-10:]) / 10 < 0.25 * losses[0]
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_pure_bf16_stalls_and_masters_do_not():
    """Why O5 exists: an update below half an ulp of a bf16 weight is lost without a master."""
    p = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    plain = torch.optim.AdamW([p], lr=6e-4, weight_decay=0.0)
    for _ in range(100):
        p.grad = torch.ones_like(p)
        plain.step()
    assert p.eq(1).all()

    model = nn.Linear(64, 1, bias=False)
    exact = nn.Linear(64, 1, bias=False)
    nn.init.ones_(model.weight)
    nn.init.ones_(exact.weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, weight_decay=0.0)
    fp32 = torch.optim.AdamW(exact.parameters(), lr=6e-4, weight_decay=0.0)
    amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    for _ in range(100):
        backward(amp, model.weight.float().sum(), optimizer)
        optimizer.step()
        exact.weight.grad = torch.ones_like(exact.weight)
        fp32.step()
    assert torch.equal(next(iter(amp.master_params(optimizer))), exact.weight)
    assert torch.equal(model.weight, exact.weight.bfloat16())
