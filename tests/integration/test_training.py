"""The demo's model trained with each optimizer at each opt level: the same loss as in fp32."""

import functools
import importlib.util
from pathlib import Path

import pytest
import torch
from kit import OPTIMIZERS, every_level, start, train
from torch.nn import functional as F

from ampctx.amp import AmpSession

DIGITS = Path(__file__).resolve().parents[2] / "examples" / "digits.py"
STEPS, LAST, BATCH = 60, 15, 32

# Learning rates that suit the model.
OPTIONS = {
    "FusedAdam": {"lr": 0.005, "weight_decay": 0.01},
    "FusedSGD": {"lr": 0.05, "nesterov": True},
    "FusedLAMB": {"lr": 0.02},
    "FusedMixedPrecisionLamb": {"lr": 0.02},
    "FusedNovoGrad": {"lr": 0.3, "weight_decay": 0.001},
    "FusedAdagrad": {"lr": 0.02},
    "LARC": {"lr": 0.1},
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


def trained(name, level, **options):
    """The mean loss of the first and of the last steps."""
    images, labels, _, _ = data()
    torch.manual_seed(0)
    session, make = AmpSession(), functools.partial(OPTIMIZERS[name], **OPTIONS[name])
    model, optimizer = start(session, level, make, digits().make_model(), **options)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1)).repeat(3)

    def loss_of(model, step):
        batch = order[step * BATCH : (step + 1) * BATCH]
        return F.cross_entropy(model(images[batch]).float(), labels[batch])

    losses = train(session, model, optimizer, STEPS, loss=loss_of, max_norm=2.0)
    skipped = session.skipped_steps(optimizer)
    session.reset()
    return sum(losses[:5]) / 5, sum(losses[-LAST:]) / LAST, skipped


@functools.cache
def in_fp32(name):
    return trained(name, "O0")


@pytest.mark.full(but=8)
@every_level
@pytest.mark.parametrize("name", OPTIONS)
def test_every_level_trains_as_fp32(name, level):
    first, expected, _ = in_fp32(name)
    assert expected < first / 3, "fp32 does not learn"
    # From 2**10 no step of this model overflows, so that each run takes all of its steps.
    scale = {"max_loss_scale": 2.0**10} if level in ("O1", "O2") else {}
    _, loss, skipped = trained(name, level, **scale)
    assert skipped == 0
    assert loss == pytest.approx(expected, rel=0.15, abs=0.03)
