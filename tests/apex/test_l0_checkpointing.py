"""Training that goes on from what amp.state_dict, model.state_dict and the optimizer's state_dict hold."""

import copy

import pytest
import torch
from apex import amp
from kit import OPTIMIZERS, Net, assert_same, backward, batch, every_level

from ampctx.amp import reset


def images(i):
    return batch(i, 8, 16).view(8, 1, 4, 4)


def steps(model, optimizer, iterations, n_losses=1):
    """Steps on several losses, each with its scaler. Returns the outputs."""
    outputs = []
    for i in iterations:
        for loss_id in range(n_losses):
            out = model(images(10 * i + loss_id))
            outputs.append(out.detach().clone())
            backward(amp, (out.float() - 1).square().mean(), optimizer, loss_id=loss_id)
        optimizer.step()
        optimizer.zero_grad()
    return outputs


def checkpoint(model, optimizer):
    """What users save, and the masters that some of them save too."""
    saved = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "amp": amp.state_dict(),
        "masters": [p.detach() for p in amp.master_params(optimizer)],
    }
    return copy.deepcopy(saved)


def started(level, n_scalers, make, saved=None, order="initialize-first"):
    """A model and an optimizer under amp, new or from a checkpoint."""
    model = Net()
    if saved is not None:
        with torch.no_grad():  # other values than those that the checkpoint came from
            for p in model.parameters():
                p.add_(1.0)
    optimizer = make(model.parameters())
    if saved is None or order == "initialize-first":
        amp.initialize(model, optimizer, opt_level=level, num_losses=n_scalers, verbosity=0)
    if saved is None:
        return model, optimizer
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    if order == "load-first":
        amp.initialize(model, optimizer, opt_level=level, num_losses=n_scalers, verbosity=0)
    amp.load_state_dict(saved["amp"])
    with torch.no_grad():
        for p, value in zip(amp.master_params(optimizer), saved["masters"], strict=True):
            p.copy_(value)
    return model, optimizer


@pytest.mark.full(but=60)
@pytest.mark.parametrize("name", ["SGD-foreach", "FusedSGD", "Adam-foreach", "FusedAdam"])
@pytest.mark.parametrize("n_losses", [1, 2])
@pytest.mark.parametrize("order", ["initialize-first", "load-first"])
@every_level
def test_training_goes_on_from_a_checkpoint(level, order, n_losses, name):
    """To the bit, once the masters are put back: apex rounded them, and the momentum too."""
    make = OPTIMIZERS[name]
    # Twice as many scalers as losses: those that no loss uses are saved as well.
    model, optimizer = started(level, 2 * n_losses, make)
    steps(model, optimizer, range(2), n_losses)
    saved = checkpoint(model, optimizer)
    assert {v.dtype for v in saved["model"].values()} == {torch.float32, torch.int64}
    expected = steps(model, optimizer, range(2, 5), n_losses)
    final, scaler = copy.deepcopy(model.state_dict()), amp.state_dict()
    reset()

    model, optimizer = started(level, 2 * n_losses, make, saved, order)
    assert_same(model.state_dict(), saved["model"])
    assert amp.state_dict() == saved["amp"]
    assert_same(steps(model, optimizer, range(2, 5), n_losses), expected)
    assert_same(model.state_dict(), final)
    assert amp.state_dict() == scaler
