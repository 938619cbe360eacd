"""The demo's model trained with each optimizer at each opt level: the same loss as in fp32."""

import functools
import importlib.util
from pathlib import Path

import pytest
import torch
from kit import backward
from torch.nn import functional as F

from ampctx import clip_grad_norm_, optimizers
from ampctx.amp import AmpSession

DIGITS = Path(__file__).resolve().parents[2] / "examples" / "digits.py"
STEPS, LAST, BATCH = 60, 15, 32

OPTIMIZERS = {
    "FusedAdam": lambda p: optimizers.FusedAdam(p, lr=0.005, weight_decay=0.01),
    "FusedSGD": lambda p: optimizers.FusedSGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "FusedLAMB": lambda p: optimizers.FusedLAMB(p, lr=0.02),
    "FusedMixedPrecisionLamb": lambda p: optimizers.FusedMixedPrecisionLamb(p, lr=0.02),
    "FusedNovoGrad": lambda p: optimizers.FusedNovoGrad(p, lr=0.3, weight_decay=0.001),
    "FusedAdagrad": lambda p: optimizers.FusedAdagrad(p, lr=0.02),
    "LARC": lambda p: optimizers.LARC(optimizers.FusedSGD(p, lr=0.1, momentum=0.9)),
}


@functools.cache
def digits():
    spec = importlib.util.spec_from_file_location("digits", DIGITS)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def data():
    return digits().load_digits(torch.device("cpu"))


def train(make, level, **kwargs):
    """The mean loss of the first and of the last steps."""
    images, labels, _, _ = data()
    torch.manual_seed(0)
    model = digits().make_model()
    session = AmpSession()
    optimizer = make(model.parameters())
    session.initialize(model, optimizer, opt_level=level, verbosity=0, **kwargs)
    losses = []
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1))
    for batch in order.repeat(3)[: STEPS * BATCH].split(BATCH):
        loss = F.cross_entropy(model(images[batch]).float(), labels[batch])
        optimizer.zero_grad()
        backward(session, loss, optimizer)
        clip_grad_norm_(session.master_params(optimizer), 2.0)
        optimizer.step()
        losses.append(loss.detach())
    skipped = session.skipped_steps(optimizer)
    session.reset()
    first, last = torch.stack(losses[:5]).mean().item(), torch.stack(losses[-LAST:]).mean().item()
    return first, last, skipped


@functools.cache
def in_fp32(name):
    return train(OPTIMIZERS[name], "O0")


@pytest.mark.full(but=8)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_level_trains_as_fp32(name, level):
    first, expected, _ = in_fp32(name)
    assert expected < first / 3, "fp32 does not learn"
    # From 2**10 no step of this model overflows, so that each run takes all of its steps.
    scale = {"max_loss_scale": 2.0**10} if level in ("O1", "O2") else {}
    _, loss, skipped = train(OPTIMIZERS[name], level, **scale)
    assert skipped == 0
    assert loss == pytest.approx(expected, rel=0.15, abs=0.03)
