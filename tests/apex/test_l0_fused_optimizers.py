"""apex's fused optimizers under amp where apex failed: at every level, with and without state, with late groups."""

import copy

import pytest
import torch
from apex import amp, optimizers
from l0 import LEVELS, ROCM_LEVELS
from torch import nn

NAMES = ("FusedAdam", "FusedSGD", "FusedLAMB", "FusedMixedPrecisionLamb", "FusedNovoGrad", "FusedAdagrad")
every_optimizer = pytest.mark.parametrize("name", NAMES)
every_level = pytest.mark.parametrize("level", [*LEVELS, *ROCM_LEVELS])


def made(name, params, lr=0.01):
    return getattr(optimizers, name)(params, lr=lr)


def step(model, optimizer):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    optimizer.zero_grad()
    loss = model(x).float().square().mean()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    return loss.item()


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))


@every_level
@every_optimizer
def test_initialized_without_and_with_state(name, level):
    """FusedNovoGrad raised KeyError without state, FusedAdam read half state as fp32."""
    model = network()
    optimizer = made(name, model.parameters())
    trained = network()
    source = made(name, trained.parameters())
    trained(torch.ones(2, 4)).sum().backward()
    source.step()
    optimizer.load_state_dict(source.state_dict())
    for m, o in ((network(), None), (model, optimizer)):
        o = o or made(name, m.parameters())
        amp.initialize(m, o, opt_level=level, max_loss_scale=64.0, verbosity=0)
        losses = [step(m, o) for _ in range(5)]
        assert losses[-1] < losses[0]
        for p in amp.master_params(o):
            floating = [v for v in o.state[p].values() if isinstance(v, torch.Tensor) and v.is_floating_point()]
            assert all(v.dtype == torch.float32 for v in floating)


@every_level
@every_optimizer
def test_a_late_group_is_stepped(name, level):
    """FusedAdam and FusedMixedPrecisionLamb never stepped it."""
    model = network()
    first, norm, second = model
    optimizer = made(name, first.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, max_loss_scale=64.0, verbosity=0)
    step(model, optimizer)
    optimizer.add_param_group({"params": [*norm.parameters(), *second.parameters()]})
    before = copy.deepcopy(list(amp.master_params(optimizer)))
    step(model, optimizer)
    for p, old in zip(amp.master_params(optimizer), before, strict=True):
        assert not torch.equal(p, old)
