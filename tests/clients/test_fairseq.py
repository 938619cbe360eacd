"""fairseq's two ``FusedAdam``: over ``fused_adam_cuda``, and over ``multi_tensor_adam`` of apex's optimizer.

The module is loaded by itself: fairseq as a whole needs older releases of its own dependencies.
"""

import contextlib
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from training import mlp, step_alike

FILE = next(Path(sys.prefix).glob("clients/sources/fairseq-*/fairseq/optim/fused_adam.py"), None)
pytestmark = pytest.mark.skipif(FILE is None, reason="'make test-clients' unpacks the sources of fairseq")


@pytest.fixture(scope="module")
def fused_adam():
    spec = importlib.util.spec_from_file_location("fairseq_fused_adam", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def cpu_in_place_of_gpu(monkeypatch):
    """fairseq steps on a GPU alone. Without one, what it moves there stays on the CPU."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(torch.Tensor, "cuda", lambda self, **options: self)


def test_fairseq_finds_apex(fused_adam):
    assert fused_adam.get_fused_adam_class() is fused_adam.FusedAdamV1


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("name", ["FusedAdamV1", "FusedAdamV2"])
def test_steps_are_torchs(fused_adam, name, weight_decay):
    ours, theirs = mlp(), mlp()
    fused = getattr(fused_adam, name)(ours.parameters(), lr=0.01, weight_decay=weight_decay)
    adam = torch.optim.AdamW(theirs.parameters(), lr=0.01, weight_decay=weight_decay)
    first = [p.detach().clone() for p in ours.parameters()]
    step_alike([(ours, fused), (theirs, adam)])
    for mine, other, before in zip(ours.parameters(), theirs.parameters(), first, strict=True):
        assert not torch.equal(mine, before)
        # V1 corrects the bias in the step size, and so decays weights more slowly at first.
        atol = 0.01 if name == "FusedAdamV1" and weight_decay else 1e-5
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=atol)


def test_fp16_weights_get_the_rounded_step_of_fp32_ones(fused_adam):
    half, full = mlp().half(), mlp().half().float()
    adam = fused_adam.FusedAdamV2
    step_alike([(model, adam(model.parameters(), lr=0.01)) for model in (half, full)], steps=1)
    for low, high in zip(half.parameters(), full.parameters(), strict=True):
        torch.testing.assert_close(low, high.half())
