"""The optimizers on a GPU, or on a GPU and the CPU at once."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from kit import assert_same, no_host_sync, params_of, snapshot
from optimizer_cases import BY_NAME, MODES, give, gradients, make, offloaded, parameters, run
from torch import nn

from ampctx.optimizers import FusedAdam, FusedLAMB, Offloaded

pytestmark = pytest.mark.cuda
DEVICE = "cuda"


def moved(params):
    return [nn.Parameter(p.detach().to(DEVICE)) for p in params]


def assert_close(name, a, b):
    """Muon's products of bf16 matrices are summed in another order on each device."""
    bounds = {"rtol": 0.0, "atol": 5e-3} if name == "muon" else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(a.cpu(), b, **bounds)


@pytest.mark.parametrize("masters", [False, True], ids=["fp32", "masters"])
@pytest.mark.parametrize("name", BY_NAME)
def test_as_on_the_cpu(name, masters):
    params, options = parameters(torch.bfloat16 if masters else torch.float32), {"master_weights": masters}
    on_gpu = BY_NAME[name](moved(params), **options)
    on_cpu = BY_NAME[name](params, **options)
    run(on_cpu, 5)
    run(on_gpu, 5)
    key = "master_param" if masters else None
    for p, q in zip(params_of(on_gpu), params_of(on_cpu), strict=True):
        a, b = (o.state[t][key] if masters else t.detach() for o, t in ((on_gpu, p), (on_cpu, q)))
        assert_close(name, a, b)
        assert {t.device.type for t in on_gpu.state[p].values()} == {DEVICE}


@pytest.mark.parametrize("name", BY_NAME)
def test_a_group_on_two_devices(name):
    half = parameters()
    mixed = [p if i % 2 else q for i, (p, q) in enumerate(zip(half, moved(half), strict=True))]
    plain, optimizer = BY_NAME[name](parameters()), BY_NAME[name](mixed)
    for o in (plain, optimizer):
        o.found_inf, o.grad_scale = torch.tensor(0.0), torch.tensor(2.0)
    run(plain, 3)
    run(optimizer, 3)
    for p, q in zip(mixed, params_of(plain), strict=True):
        assert_close(name, p.detach(), q.detach())


@pytest.mark.parametrize("name", BY_NAME)
def test_a_step_does_not_wait_for_the_device(name):
    optimizer = BY_NAME[name](moved(parameters()))
    run(optimizer, 2)
    optimizer.found_inf, optimizer.grad_scale = (torch.zeros((), device=DEVICE), torch.ones((), device=DEVICE))
    give(params_of(optimizer), gradients(params_of(optimizer), 0))
    with no_host_sync():
        optimizer.step()
        optimizer.param_groups[0]["lr"] = torch.full((), 0.01, device=DEVICE)
        optimizer.step()


@pytest.mark.parametrize("name", BY_NAME)
def test_a_captured_step_follows_lr_flag_and_count(name):
    """Replays equal eager steps bit for bit, also over an overflow and a new lr."""
    runs = []
    for captured in (False, True):
        optimizer = BY_NAME[name](moved(parameters(torch.bfloat16)), master_weights=True, capturable=True)
        optimizer.found_inf = torch.zeros((), device=DEVICE)
        params = params_of(optimizer)
        held = [torch.empty_like(p) for p in params]
        give(params, held)
        graph = torch.cuda.CUDAGraph()
        for step in range(8):
            for g, value in zip(held, gradients(params, step), strict=True):
                g.copy_(value)
            optimizer.found_inf.fill_(step == 5)
            optimizer.param_groups[0]["lr"].fill_(0.01 / (step + 1))
            if not captured or step < 3:
                optimizer.step()
                continue
            if step == 3:
                torch.cuda.synchronize()
                with torch.cuda.graph(graph):
                    optimizer.step()
            graph.replay()
        runs.append([t.clone() for p in params for t in (p.detach(), *optimizer.state[p].values())])
    torch.testing.assert_close(*runs, rtol=0, atol=0)


@pytest.mark.parametrize("kind", [FusedAdam, FusedLAMB])
def test_a_checkpoint_mapped_to_the_cpu_goes_to_the_device(kind):
    source, target = (kind(params, capturable=True) for params in (parameters(), moved(parameters())))
    run(source, 2)
    target.load_state_dict(source.state_dict())
    assert {t.device.type for s in target.state.values() for t in s.values()} == {DEVICE}
    assert target.param_groups[0]["lr"].device.type == DEVICE
    run(target, 1)


# --- offload: pinned memory, streams, and the bits of the kernels there -----------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["adam", "sgd", "adagrad", "lion"])
def test_100_steps_have_the_bits_of_steps_on_the_gpu(name, mode):
    both = [made(name, mode, moved(parameters(MODES[mode][0]))) for made in (make, offloaded)]
    for step in range(100):
        for optimizer in both:
            params = params_of(optimizer)
            give(params, gradients(params, step))
            optimizer.found_inf = torch.full((), float(step % 9 == 4), device=DEVICE)
            optimizer.grad_scale = torch.full((), 8.0, device=DEVICE)
            optimizer.step()
    assert_same(*([t.cpu() for t in snapshot(optimizer)] for optimizer in both))
    assert_same(*([p.grad.cpu() for p in params_of(optimizer)] for optimizer in both))
    assert {t.device.type for state in both[1].state.values() for t in state.values()} == {"cpu"}
    assert all(twin.is_pinned() and twin.grad.is_pinned() for twin in params_of(both[1].inner))


def test_a_network_trains_to_the_bits_and_its_memory_does_not_grow():
    found, taken = [], []
    for kind in (FusedAdam, partial(Offloaded, FusedAdam)):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))).bfloat16().to(DEVICE)
        optimizer = kind(model.parameters(), lr=1e-3, master_weights="split")
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
