"""``offload="cpu"`` of parameters on a GPU: pinned memory, streams, and the bits of the kernels there."""

from __future__ import annotations

import pytest
import torch
from kit import assert_same, params_of, snapshot
from optimizer_cases import BY_NAME, MODES, give, gradients, parameters
from torch import nn

from ampctx.optimizers import FusedAdam

pytestmark = pytest.mark.cuda
DEVICE = "cuda"


def on_device(dtype):
    return [nn.Parameter(p.detach().to(DEVICE)) for p in parameters(dtype)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["adam", "sgd", "adagrad", "lion"])
def test_100_steps_have_the_bits_of_steps_on_the_gpu(name, mode):
    dtype, options = MODES[mode]
    both = [BY_NAME[name](on_device(dtype), **options, offload=offload) for offload in (None, "cpu")]
    for step in range(100):
        for optimizer in both:
            params = params_of(optimizer)
            give(params, [g.to(DEVICE) for g in gradients(params, step)])
            optimizer.found_inf = torch.full((), float(step % 9 == 4), device=DEVICE)
            optimizer.grad_scale = torch.full((), 8.0, device=DEVICE)
            optimizer.step()
    assert_same(*([t.cpu() for t in snapshot(optimizer)] for optimizer in both))
    assert_same(*([p.grad.cpu() for p in params_of(optimizer)] for optimizer in both))
    offloaded = both[1]
    assert {t.device.type for state in offloaded.state.values() for t in state.values()} == {"cpu"}
    assert all(twin.weight.is_pinned() and twin.grad.is_pinned() for twin in offloaded._offload._twins.values())


def test_a_network_trains_to_the_bits_and_its_memory_does_not_grow():
    found, taken = [], []
    for options in ({}, {"offload": "cpu"}):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))).bfloat16().to(DEVICE)
        optimizer = FusedAdam(model.parameters(), lr=1e-3, master_weights="split", **options)
        for step in range(100):
            for _ in range(2):
                model(torch.randn(64, 256, device=DEVICE, dtype=torch.bfloat16)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step in (20, 99):
                torch.cuda.synchronize()
                taken.append(torch.cuda.memory_allocated())
        found.append([t.cpu() for t in snapshot(optimizer)])
        del model, optimizer
    assert_same(*found)
    assert taken[2] == taken[3] < taken[0]
