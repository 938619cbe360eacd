"""The loop on a GPU."""

import pytest
import torch
from kit import backward
from test_opt_levels import data, make_model
from torch import nn

from ampctx import amp, clip_grad_norm_

pytestmark = pytest.mark.cuda
LEVELS = ("O0", "O1", "O2", "O4", "O5")


@pytest.fixture(autouse=True)
def _clean():
    yield
    amp.reset()


def train(device, level, steps=40):
    model = make_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if level is not None:
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    losses = []
    for step in range(steps):
        images, labels = (t.to(device) for t in data(step))
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        if level is None:
            loss.backward()
        else:
            backward(amp, loss, optimizer)
            clip_grad_norm_(amp.master_params(optimizer), 100.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("level", LEVELS)
def test_trains_like_fp32(level):
    expected, losses = train("cuda", None), train("cuda", level)
    assert losses[0] == pytest.approx(expected[0], abs=0.15)
    assert sum(losses[-10:]) / 10 == pytest.approx(sum(expected[-10:]) / 10, abs=0.15)


@pytest.mark.parametrize("level", LEVELS)
def test_nothing_but_the_step_waits_for_the_device(level):
    model = make_model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    images, labels = (t.cuda() for t in data(0))
    for step in range(6):
        if step:  # the first iteration creates the scale's tensors
            torch.cuda.set_sync_debug_mode("error")
        try:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            backward(amp, loss, optimizer)
            clip_grad_norm_(amp.master_params(optimizer), 1.0)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        optimizer.step()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_changes_nothing(level):
    model = make_model().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    before = [p.detach().clone() for p in (*model.parameters(), *amp.master_params(optimizer))]
    images, labels = (t.cuda() for t in data(0))
    with amp.scale_loss(nn.functional.cross_entropy(model(images), labels), optimizer) as scaled_loss:
        scaled_loss.backward()
        next(model.parameters()).grad.view(-1)[0] = float("nan")
    optimizer.step()
    assert amp.skipped_steps(optimizer) == 1
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 32768.0
    for old, new in zip(before, (*model.parameters(), *amp.master_params(optimizer)), strict=True):
        assert torch.equal(old, new)
