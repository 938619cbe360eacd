"""What amp.state_dict and model.state_dict hold, and training that goes on from them."""

import copy

import pytest
import torch
from apex import amp
from apex.optimizers import FusedAdam, FusedSGD
from l0 import LEVELS, ROCM_LEVELS
from torch import nn
from torch.nn import functional as F

from ampctx.amp import reset

ALL_LEVELS = [*LEVELS, *ROCM_LEVELS]


class Net(nn.Module):
    """Convolution, BatchNorm, and a parameter of the model's own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.gain = nn.Parameter(torch.randn(6))

    def forward(self, x):
        return self.norm(self.conv(x)).relu() * self.gain


def batch(i, factor=1.0):
    return torch.randn(4, 2, 6, 6, generator=torch.Generator().manual_seed(i)) * factor


def train(model, optimizer, iterations, n_losses=1, factors=None):
    """Steps on as many losses as there are scalers. Returns the outputs."""
    outputs = []
    for i in iterations:
        for loss_id in range(n_losses):
            out = model(batch(10 * i + loss_id, 1.0 if factors is None else factors[loss_id]))
            outputs.append(out.detach().clone())
            with amp.scale_loss(F.mse_loss(out.float(), torch.ones_like(out)), optimizer, loss_id=loss_id) as scaled:
                scaled.backward()
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


def started(level, n_scalers, make, saved=None, order="initialize-first", masters=False):
    """A model and an optimizer under amp, new or from a checkpoint."""
    if saved is None:
        model = Net()
        return amp.initialize(model, make(model.parameters()), opt_level=level, num_losses=n_scalers, verbosity=0)
    # Other values than those that the checkpoint came from.
    model = Net()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    optimizer = make(model.parameters())
    if order == "initialize-first":
        amp.initialize(model, optimizer, opt_level=level, num_losses=n_scalers, verbosity=0)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    if order == "load-first":
        amp.initialize(model, optimizer, opt_level=level, num_losses=n_scalers, verbosity=0)
    amp.load_state_dict(saved["amp"])
    if masters:
        with torch.no_grad():
            for p, value in zip(amp.master_params(optimizer), saved["masters"], strict=True):
                p.copy_(value)
    return model, optimizer


def assert_same(a, b):
    assert a.keys() == b.keys()
    for key in a:
        assert a[key].dtype == b[key].dtype, key
        assert torch.equal(a[key], b[key]), key


OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05),
    "SGD-momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "FusedSGD-momentum": lambda params: FusedSGD(params, lr=0.05, momentum=0.9),
    # In fp16 (O3) its default eps would be 0.
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01, eps=1e-4),
    "FusedAdam": lambda params: FusedAdam(params, lr=0.01),
}


@pytest.mark.full(but=60)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("n_losses", [1, 2])
@pytest.mark.parametrize("order", ["initialize-first", "load-first"])
@pytest.mark.parametrize("level", ALL_LEVELS)
def test_training_goes_on_from_a_checkpoint(level, order, n_losses, name):
    """To the bit, once the masters are put back: apex rounded them, and the momentum too."""
    make = OPTIMIZERS[name]
    # Twice as many scalers as losses: those that no loss uses are saved as well.
    model, optimizer = started(level, 2 * n_losses, make)
    train(model, optimizer, range(2), n_losses)
    saved = checkpoint(model, optimizer)
    expected = train(model, optimizer, range(2, 5), n_losses)
    final, scaler = copy.deepcopy(model.state_dict()), amp.state_dict()
    reset()

    model, optimizer = started(level, 2 * n_losses, make, saved, order, masters=True)
    assert_same(model.state_dict(), saved["model"])
    assert amp.state_dict() == saved["amp"]
    outputs = train(model, optimizer, range(2, 5), n_losses)
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
    assert_same(model.state_dict(), final)
    assert amp.state_dict() == scaler


@pytest.mark.parametrize("order", ["initialize-first", "load-first"])
@pytest.mark.parametrize("level", ALL_LEVELS)
def test_a_checkpoint_without_masters(level, order):
    """As apex's users save it: the model's outputs are those of before, at O2 and O5 its next steps nearly so."""
    make = OPTIMIZERS["SGD"]
    model, optimizer = started(level, 1, make)
    train(model, optimizer, range(2))
    saved = checkpoint(model, optimizer)
    expected = model.eval()(batch(0)).detach()
    final = train(model.train(), optimizer, range(2, 5))[-1]
    reset()

    model, optimizer = started(level, 1, make, saved, order)
    assert_same(model.state_dict(), saved["model"])
    assert torch.equal(model.eval()(batch(0)), expected)
    out = train(model.train(), optimizer, range(2, 5))[-1]
    if level in ("O2", "O5"):
        bound = 2e-2 if level == "O2" else 1e-1
        torch.testing.assert_close(out, final, rtol=bound, atol=bound)
    else:
        assert torch.equal(out, final)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("n_losses", [1, 2, 3])
def test_overflows_move_the_scaler_of_their_loss(level, n_losses):
    """Loss i overflows in i iterations, and never again."""
    model, optimizer = started(level, n_losses, OPTIMIZERS["SGD"])
    for iteration in range(4):
        train(model, optimizer, [iteration], n_losses, [2.0**17 if i > iteration else 1.0 for i in range(n_losses)])
        state = amp.state_dict()
        assert list(state) == [f"loss_scaler{i}" for i in range(n_losses)]
        for i in range(n_losses):
            halvings = min(i, iteration + 1)
            assert state[f"loss_scaler{i}"] == {
                "loss_scale": 2.0 ** (16 - halvings),
                "unskipped": iteration + 1 - halvings,
            }


# torch's Adam divides by 0 in fp16 (O3), where its eps is 0.
@pytest.mark.parametrize(
    ("level", "name"),
    [(level, name) for level in ALL_LEVELS for name in ("Adam", "FusedAdam") if (level, name) != ("O3", "Adam")],
)
def test_state_dicts_are_fp32_while_the_loss_falls(level, name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    kind = torch.optim.Adam if name == "Adam" else FusedAdam
    optimizer = kind(model.parameters(), lr=1e-3)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    x, y = torch.randn(32, 6), torch.randn(32, 2)
    losses = []
    for _ in range(10):
        loss = F.mse_loss(model(x).float(), y)
        losses.append(loss.item())
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert {v.dtype for v in model.state_dict().values()} == {torch.float32, torch.int64}
        assert {v.dtype for v in model[0].state_dict().values()} == {torch.float32}
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]
