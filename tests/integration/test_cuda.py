"""The loop on a GPU."""

from contextlib import nullcontext

import pytest
import torch
from kit import OPTIMIZERS, assert_same, backward, no_host_sync, scale_of, start, train
from torch import nn

from ampctx import clip_grad_norm_
from ampctx.__main__ import main

pytestmark = pytest.mark.cuda
on_levels = pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])


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


def losses_of(session, level, make, steps, max_norm):
    """Of a run under amp, or without it where ``session`` is None."""
    model = make_model().cuda()
    if session is None:
        return train(None, model, OPTIMIZERS[make](model.parameters()), steps, loss=loss_of, max_norm=max_norm)
    model, optimizer = start(session, level, make, model)
    return train(session, model, optimizer, steps, loss=loss_of, max_norm=max_norm)


@on_levels
def test_trains_like_fp32(session, level):
    expected, losses = (losses_of(some, level, "AdamW-foreach", 40, 100.0) for some in (None, session))
    assert losses[0] == pytest.approx(expected[0], abs=0.15)
    assert sum(losses[-10:]) / 10 == pytest.approx(sum(expected[-10:]) / 10, abs=0.15)


@on_levels
def test_nothing_but_the_step_waits_for_the_device(session, level):
    model, optimizer = start(session, level, "AdamW-foreach", make_model().cuda())
    images, labels = (t.cuda() for t in data(0))
    for step in range(6):
        with no_host_sync() if step else nullcontext():  # the first iteration creates the scale's tensors
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            backward(session, loss, optimizer)
            clip_grad_norm_(session.master_params(optimizer), 1.0)
        optimizer.step()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_changes_nothing(session, level):
    model, optimizer = start(session, level, "SGD-foreach", make_model().cuda())
    before = [p.detach().clone() for p in (*model.parameters(), *session.master_params(optimizer))]
    images, labels = (t.cuda() for t in data(0))
    with session.scale_loss(nn.functional.cross_entropy(model(images), labels), optimizer) as scaled_loss:
        scaled_loss.backward()
        next(model.parameters()).grad.view(-1)[0] = float("nan")
    optimizer.step()
    assert session.skipped_steps(optimizer) == 1
    assert scale_of(session) == 32768.0
    assert_same([*model.parameters(), *session.master_params(optimizer)], before)


def test_info_compares_the_ops_with_plain_torch(capsys):
    assert main(["info", "--test"]) == 0
    assert "test       on cuda:" in capsys.readouterr().out
