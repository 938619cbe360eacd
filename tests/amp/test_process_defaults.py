"""torch.set_default_dtype and torch.set_default_device, which many programs call first, change nothing here."""

import contextlib

import pytest
import torch
from kit import OPTIMIZERS, every_level, start
from torch import nn

from ampctx import GradScaler, clip_grad_norm_
from ampctx.amp import AmpSession
from ampctx.optimizers import FusedAdam, Offloaded, SplitMasters

# No tensor can be used that is made on "meta" by accident.
DEFAULTS = {"fp64": (torch.float64, None), "bf16": (torch.bfloat16, None), "device": (torch.float32, "meta")}
OURS = {name: make for name, make in OPTIMIZERS.items() if "-" not in name}
LOW = {
    "stochastic": lambda p: FusedAdam(p, write_back="stochastic"),
    "bf16-state": lambda p: FusedAdam(p, state_dtype=torch.bfloat16),
    "8bit": lambda p: FusedAdam(p, state_dtype="8bit", min_8bit_size=1),
    "masters": lambda p: FusedAdam(p, master_weights=True),
    "split": lambda p: FusedAdam(p, master_weights="split", skip_nonfinite=True, skip_norm_above=1e3),
    "offload": lambda p: Offloaded(FusedAdam, p),
    "SplitMasters": lambda p: SplitMasters(torch.optim.SGD, p, momentum=0.9, skip_nonfinite=True),
}


@contextlib.contextmanager
def defaults(dtype, device):
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def assert_unchanged(run, given):
    expected = run()
    with defaults(*given):
        found = run()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@every_level
@pytest.mark.parametrize("given", DEFAULTS.values(), ids=DEFAULTS)
def test_amp(level, given):
    weights, x = torch.linspace(-1, 1, 12).view(3, 4), torch.linspace(-1, 2, 32).view(8, 4)

    def run():
        session = AmpSession()
        model = nn.Linear(4, 3, dtype=torch.float32, device="cpu")
        nn.init.ones_(model.bias)
        model.weight.data.copy_(weights)
        model, optimizer = start(session, level, "FusedAdam", model, loss_scale="dynamic", max_loss_scale=256.0)
        for i in range(4):
            with session.scale_loss(model(x).float().square().mean() * (1e38 if i == 2 else 1), optimizer) as loss:
                loss.backward()
            if i != 1:
                clip_grad_norm_(session.master_params(optimizer), 0.5)
            optimizer.step()
            assert session.outcome(optimizer).skipped == (i == 2)
            optimizer.zero_grad()
        session.set_state_dict(model, optimizer, session.get_state_dict(model, optimizer))
        found = [p.detach().clone() for p in session.master_params(optimizer)]
        session.reset()
        return found

    assert_unchanged(run, given)


@pytest.mark.full(but=24)
@pytest.mark.parametrize("name", [*OURS, *LOW])
@pytest.mark.parametrize("given", DEFAULTS.values(), ids=DEFAULTS)
def test_optimizers(name, given):
    values = [torch.linspace(-1, 2, n).view(-1, 4) for n in (1200, 4)]
    values = [v.bfloat16() for v in values] if name in LOW else values

    def run():
        params = [nn.Parameter(v.clone()) for v in values]
        optimizer = {**OURS, **LOW}[name](params)
        for _ in range(3):
            for p, v in zip(params, values, strict=True):
                p.grad = v / 2
            clip_grad_norm_(params, 0.5)
            optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
        return [p.detach() for p in params]

    assert_unchanged(run, given)


@pytest.mark.parametrize("given", DEFAULTS.values(), ids=DEFAULTS)
def test_grad_scaler(given):
    ones = torch.ones(4)

    def run():
        p = nn.Parameter(ones.clone())
        scaler, optimizer = GradScaler("cpu", init_scale=2.0**10, growth_interval=2), torch.optim.SGD([p], lr=0.1)
        for i in range(5):
            scaler.scale((p * (1e38 if i == 3 else 1.0)).sum()).backward()
            if i % 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scaler.get_scale() == 2.0**10
        return p.detach()

    assert_unchanged(run, given)
