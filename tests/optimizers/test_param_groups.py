"""One op call steps the parameters of all groups that differ in numbers alone, with the bits of a call for each."""

import pytest
import torch
from kit import assert_same, params_of, snapshot
from optimizer_cases import BY_NAME, MODES, ONE_CALL, gradients, parameters
from torch.profiler import ProfilerActivity, profile

from ampctx.optimizers import FusedAdam, FusedMuon

GROUPS = 6
OWN = {"betas": (0.5, 0.9), "weight_decay": 0.0, "eps": 1e-3, "momentum": 0.5, "dampening": 0.3, "max_grad_norm": 0.1}
MORE = {"bf16-state": {"state_dtype": torch.bfloat16}, "8bit": {"state_dtype": "8bit", "min_8bit_size": 4}}


def groups_of(dtype, apart, names):
    """Each with an lr and an option of its own. ``apart``: with lr tensors, for each of which there is an op call."""
    found = []
    for g in range(GROUPS):
        shapes = [(3, 5), (0,), (17,), (5, 4)][g % 2 :]
        lr = torch.tensor(0.01 * (g + 1), dtype=torch.float64) if apart else 0.01 * (g + 1)
        own = [(name, OWN[name]) for name in OWN if name in names]
        found.append({"params": parameters(dtype, shapes, seed=g), "lr": lr, **dict(own[g % len(own) :][: g % 3])})
    return found


def step(optimizer, at):
    """One of a schedule, which leaves out a gradient and changes options of some groups."""
    params = params_of(optimizer)
    for p, grad in zip(params, gradients(params, at), strict=True):
        p.grad = torch.empty_like(p).copy_(grad)
    params[4].grad = None if at % 3 == 1 else params[4].grad
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 0.9
    optimizer.param_groups[-1]["weight_decay"] = 0.25 * (at // 2)
    if "betas" in optimizer.param_groups[0] and at % 2:
        optimizer.param_groups[1]["betas"] = (0.25, 0.5 + at / 20)
    optimizer.param_groups[2]["maximize"] = at > 4
    optimizer.step()


def op_calls(call):
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        call()
    return [event.name for event in profiler.events() if event.name.startswith("ampctx::multi_tensor_")]


KINDS = [(name, mode, {}) for name in ONE_CALL for mode in MODES]
KINDS += [(name, "fp32", more) for name in ("lion", "lamb", "sgd") for more in MORE.values()]


@pytest.mark.parametrize(("name", "mode", "more"), KINDS, ids=lambda value: value if isinstance(value, str) else None)
def test_groups_step_together_as_they_step_apart(name, mode, more):
    dtype, options = MODES[mode]
    names = BY_NAME[name](parameters(shapes=[(1,)])).defaults
    one, other = (BY_NAME[name](groups_of(dtype, apart, names), **options, **more) for apart in (False, True))
    for at in range(7):
        step(one, at)
        step(other, at)
        assert_same(snapshot(one), snapshot(other))
    steps = f"ampctx::multi_tensor_{name}"
    counts = [op_calls(lambda o=o: step(o, 7)).count(steps) for o in (one, other)]
    assert counts == [(2 if not more else counts[0]), counts[1]], "all but the group that maximizes"
    assert counts[0] < counts[1]


def test_465_groups_whose_lrs_change_at_each_step_are_one_op_call():
    params = [[torch.nn.Parameter(torch.full((2,), i / 100.0)) for i in range(465)] for _ in range(2)]
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


def test_adamw_groups_of_muon_have_their_options():
    """A step of a subclass reads the options of one group."""
    optimizer = FusedMuon([{"params": parameters(seed=g), "use_muon": False, "lr": 0.01 * g} for g in range(3)])
    adam = FusedAdam([{"params": parameters(seed=g), "lr": 0.01 * g} for g in range(3)], weight_decay=0.1)
    for at in range(3):
        step(optimizer, at)
        step(adam, at)
    assert all(torch.equal(p, q) for p, q in zip(params_of(optimizer), params_of(adam), strict=True))
