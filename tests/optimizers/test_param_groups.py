"""One op call steps the parameters of all groups that differ in numbers alone, with the bits of a call for each."""

import pytest
import torch
from kit import assert_same, params_of, snapshot
from optimizer_cases import BY_NAME, MODES, ONE_CALL, gradients, parameters
from torch import nn
from torch.profiler import ProfilerActivity, profile

from ampctx.optimizers import FusedAdam

OWN = {"betas": (0.5, 0.9), "weight_decay": 0.0, "eps": 1e-3, "momentum": 0.5, "dampening": 0.3, "max_grad_norm": 0.1}
REDUCED = {"bf16": {"state_dtype": torch.bfloat16}, "8bit": {"state_dtype": "8bit", "min_8bit_size": 4}}
KINDS = [*((name, mode, {}) for name in ONE_CALL for mode in MODES)]
KINDS += [(name, "fp32", options) for name in ("lion", "lamb", "sgd") for options in REDUCED.values()]


def groups_of(dtype, apart, names):
    """Six with an lr and options of their own. ``apart``: with lr tensors, for each of which there is an op call."""
    own = [(name, OWN[name]) for name in OWN if name in names]
    for g in range(6):
        params = parameters(dtype, [(3, 5), (0,), (17,), (5, 4)][g % 2 :], seed=g)
        lr = torch.tensor(0.01 * (g + 1), dtype=torch.float64) if apart else 0.01 * (g + 1)
        yield {"params": params, "lr": lr, **dict(own[g % len(own) :][: g % 3])}


def step(optimizer, at):
    """One of a schedule. Options of some groups change, and a parameter has no gradient now and then."""
    params, groups = params_of(optimizer), optimizer.param_groups
    for i, (p, grad) in enumerate(zip(params, gradients(params, at), strict=True)):
        p.grad = None if i == 4 and at % 3 == 1 else torch.empty_like(p).copy_(grad)
    for group in groups:
        group["lr"] = group["lr"] * 0.9
    groups[-1]["weight_decay"] = 0.25 * (at // 2)
    if "betas" in groups[1] and at % 2:
        groups[1]["betas"] = (0.25, 0.5 + at / 20)
    groups[2]["maximize"] = at > 4
    optimizer.step()


def op_calls(call, *args):
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        call(*args)
    return [event.name for event in profiler.events() if event.name.startswith("ampctx::multi_tensor_")]


@pytest.mark.parametrize(("name", "mode", "more"), KINDS)
def test_groups_step_together_as_they_step_apart(name, mode, more):
    (dtype, options), names = MODES[mode], BY_NAME[name](parameters(shapes=[(1,)])).defaults
    one, other = (BY_NAME[name]([*groups_of(dtype, apart, names)], **options, **more) for apart in (False, True))
    for at in range(7):
        step(one, at)
        step(other, at)
        assert_same(snapshot(one), snapshot(other))
    counts = [op_calls(step, optimizer, 7).count(f"ampctx::multi_tensor_{name}") for optimizer in (one, other)]
    assert counts == ([4, 11] if "min_8bit_size" in more else [2, 6]), "one maximizes; small parameters have no codes"


def test_465_groups_whose_lrs_change_at_each_step_are_one_op_call():
    params = [[nn.Parameter(torch.full((2,), i / 100.0)) for i in range(465)] for _ in range(2)]
    one = FusedAdam([{"params": [p], "lr": 1e-3 + i * 1e-5, "eps": 1e-8 + i * 1e-9} for i, p in enumerate(params[0])])
    alone = [FusedAdam([p], lr=1e-3 + i * 1e-5, eps=1e-8 + i * 1e-9) for i, p in enumerate(params[1])]
    for at in range(5):
        for i, group in enumerate([*one.param_groups, *(o.param_groups[0] for o in alone)]):
            group["lr"] *= 0.9 + i % 465 / 10_000
            group["params"][0].grad = torch.tensor([0.1 * at + 1, -1.0 / (1 + i % 465)])
        assert op_calls(one.step) == ["ampctx::multi_tensor_adam"]
        for optimizer in alone:
            optimizer.step()
        assert torch.equal(*map(torch.stack, params))
