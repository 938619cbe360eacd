"""The fused optimizers under ampctx.amp: gradients stay in 16 bits, model weights are written with their masters."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from host_reads import OpCalls
from kit import assert_same, backward, params_of, start, train, with_plans
from optimizer_cases import BY_NAME
from torch import nn

from ampctx.amp import AmpSession
from ampctx.optimizers import FusedAdam, FusedSGD


@pytest.mark.parametrize("write_back", ["nearest", "kahan", "stochastic"])
def test_a_model_in_fp16_without_masters_trains(session, write_back):
    """Where torch's Adam ends in nan: its eps is 0 in fp16."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(32, 4)
    make, scale = partial(FusedAdam, lr=0.01, write_back=write_back), {"loss_scale": "dynamic", "max_loss_scale": 64.0}
    model, optimizer = start(session, "O3", make, model, **scale)

    def loss(model, step):
        return (model(x).float() - x.sum(1, keepdim=True)).square().mean()

    losses = train(session, model, optimizer, 20, loss=loss, overflow_at=(2,))
    assert session.skipped_steps(optimizer) == 1
    assert losses[-1] < 0.8 * losses[0]
    assert {p.dtype for p in session.master_params(optimizer)} == {torch.float16}


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("name", BY_NAME)
@with_plans
def test_a_step_is_one_pass_over_16_bit_gradients(name, level):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer, session = BY_NAME[name](model.parameters()), AmpSession()
    session.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    for step in range(3):
        backward(session, model(torch.randn(8, 4)).float().square().mean(), optimizer)
        with OpCalls() as calls:
            optimizer.step()
        if step:
            op = {"mixed-lamb": "lamb"}.get(name, name)
            # Muon steps two weights of their own shapes by two calls, and the biases by Adam's.
            expected = (2, 2 * 2 + 2) if name == "muon" else (1, 1)
            assert (calls.of[f"multi_tensor_{op}"], calls.on_lists) == expected
            assert calls.count == 0
        optimizer.zero_grad()
    assert all(optimizer.state[p]["step"] == 3 for p in params_of(optimizer))
    assert all("master_param" not in optimizer.state[p] for p in params_of(optimizer))
    session.reset()
    assert all(p.dtype == torch.float32 for p in params_of(optimizer))


@pytest.mark.parametrize("level", ["O0", "O3"])
def test_state_from_before_initialize_stays_in_fp32(level):
    """A model cast to 16 bits takes state along that the optimizer keeps in fp32."""
    p = nn.Parameter(torch.ones(3, dtype=torch.float32 if level == "O3" else torch.float64))
    model = nn.ParameterList([p])
    optimizer, session = FusedSGD([p], lr=0.5, momentum=0.9), AmpSession()
    p.grad = torch.full_like(p, 1.0001)  # no fp16 number
    optimizer.step()
    session.initialize(model, optimizer, opt_level=level, verbosity=0)
    state = optimizer.state[p]["momentum_buffer"]
    assert_same([state], [torch.full((3,), 1.0001)])
    p.grad = torch.zeros_like(p)
    optimizer.step()
    session.reset()
    assert_same([optimizer.state[p]["momentum_buffer"].float()], [torch.full((3,), 1.0001) * 0.9])
