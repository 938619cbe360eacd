"""``SplitMasters`` against the class that it wraps, on fp32 weights: every bit of weights and state."""

from __future__ import annotations

import copy

import pytest
import torch
from kit import assert_same, each_copy, params_of, through_a_file
from optimizer_cases import give, gradients, masters_of, parameters
from torch import nn

import ampctx
from ampctx.optimizers import FusedAdam, SplitMasters

KINDS = {
    "ASGD": (torch.optim.ASGD, {"t0": 2}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adafactor": (torch.optim.Adafactor, {}),
    "Adagrad": (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}),
    "Adam": (torch.optim.Adam, {"amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"foreach": True}),
    "fused AdamW": (torch.optim.AdamW, {"fused": True}),
    "Adamax": (torch.optim.Adamax, {}),
    "Muon": (torch.optim.Muon, {}),
    "NAdam": (torch.optim.NAdam, {"weight_decay": 0.1}),
    "RAdam": (torch.optim.RAdam, {}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "Rprop": (torch.optim.Rprop, {}),
    "SGD": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
}


def shapes_of(name):
    return [(3, 5), (5, 4)] if name == "Muon" else [(3, 5), (), (17,), (2, 3, 4, 4), (5, 4)]


def pair(name, chunk_bytes=64):
    """The class over fp32 weights, and SplitMasters over bf16 ones of the same values."""
    kind, options = KINDS[name]
    low = parameters(torch.bfloat16, shapes_of(name))
    wide = [nn.Parameter(p.detach().float()) for p in low]
    return kind(wide, lr=0.01, **options), SplitMasters(kind, low, chunk_bytes, lr=0.01, **options)


def step_both(plain, ours, steps, first=0):
    for step in range(first, first + steps):
        grads = gradients(params_of(ours), step)
        give(params_of(ours), grads)
        give(params_of(plain), [g.float() for g in grads])
        plain.step()
        ours.step()


def states(optimizer):
    """In the order of the parameters, without remainders."""
    found = [optimizer.state.get(p, {}) for p in params_of(optimizer)]
    return [{key: value for key, value in state.items() if key != "remainder"} for state in found]


def assert_alike(plain, ours):
    assert_same(masters_of(ours), [p.detach() for p in params_of(plain)])
    assert_same(states(ours), states(plain))
    for p, w in zip(params_of(ours), masters_of(ours), strict=True):
        assert (p.float() - w).abs().max() <= (w.abs() * 2**-8).max()


@pytest.mark.parametrize("name", KINDS)
def test_steps_have_the_bits_of_the_class_on_fp32_weights(name):
    plain, ours = pair(name)
    step_both(plain, ours, 5)
    assert_alike(plain, ours)


@pytest.mark.parametrize("chunk_bytes", [1, 100, 2**28])
def test_chunks_do_not_matter(chunk_bytes):
    plain, ours = pair("NAdam", chunk_bytes)
    step_both(plain, ours, 3)
    assert_alike(plain, ours)


def test_memory_of_a_step_ends_with_it():
    _, ours = pair("NAdam")
    give(params_of(ours), gradients(params_of(ours), 0))
    ours.step()
    proxies = params_of(ours.inner)
    assert all(p.grad is None and p.untyped_storage().nbytes() == 4 for p in proxies)
    assert {value.dtype for state in states(ours) for value in state.values()} == {torch.float32}
    assert {state["remainder"].dtype for state in ours.state.values()} == {torch.int16}


def test_an_lr_scheduler_groups_and_frozen_parameters():
    found = []
    for wide in (False, True):
        params = parameters(torch.bfloat16, [(3, 5), (4,), (2, 2), (3,)])
        if wide:
            params = [nn.Parameter(p.detach().float()) for p in params]
        groups = [{"params": params[:1], "lr": 0.1}, {"params": params[1:2]}]
        make = torch.optim.NAdam if wide else lambda *a, **o: SplitMasters(torch.optim.NAdam, *a, chunk_bytes=8, **o)
        optimizer = make(groups, lr=0.01)
        optimizer.add_param_group({"params": params[2:], "weight_decay": 0.1})
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for step in range(4):
            grads = [g.to(torch.bfloat16).to(p.dtype) for g, p in zip(gradients(params, step), params, strict=True)]
            give(params, [None, *grads[1:]] if step == 1 else grads)
            optimizer.step()
            scheduler.step()
        found.append([p.detach() for p in params] if wide else masters_of(optimizer))
    assert_same(*found)


def test_fp32_parameters_are_stepped_as_they_are():
    plain, _ = pair("NAdam")
    ours = SplitMasters(torch.optim.NAdam, [nn.Parameter(p.detach().clone()) for p in params_of(plain)], lr=0.01,
                        weight_decay=0.1)  # fmt: skip
    before = [p._version for p in params_of(ours)]
    for step in range(3):
        for optimizer in (plain, ours):
            give(params_of(optimizer), gradients(params_of(optimizer), step))
            optimizer.step()
    assert_same([p.detach() for p in params_of(ours)], [p.detach() for p in params_of(plain)])
    assert all(now._version > was for now, was in zip(params_of(ours), before, strict=True))


def test_a_changed_weight_counts():
    _, ours = pair("SGD")
    give(params_of(ours), gradients(params_of(ours), 0))
    ours.step()
    p = params_of(ours)[0]
    ours.state[p]["remainder"].fill_(-1)
    with torch.no_grad():
        p.zero_()
    p.grad = torch.ones_like(p)
    ours.step()
    torch.testing.assert_close(masters_of(ours)[0], torch.full((3, 5), -0.01))


@pytest.mark.parametrize("name", KINDS)
def test_a_checkpoint_resumes_to_the_bit(name):
    plain, ours = pair(name)
    step_both(plain, ours, 2)
    _, resumed = pair(name)
    for p, q in zip(params_of(resumed), params_of(ours), strict=True):
        p.data.copy_(q)
    resumed.load_state_dict(through_a_file(ours.state_dict()))
    step_both(plain, resumed, 2, first=2)
    assert_alike(plain, resumed)


def test_the_class_loads_its_state_and_the_other_way():
    plain, ours = pair("NAdam")
    step_both(plain, ours, 2)
    other, loaded = pair("NAdam")
    other.load_state_dict(ours.state_dict())
    loaded.load_state_dict(plain.state_dict())
    for optimizer in (other, loaded):
        assert_same(states(optimizer), states(plain))


@each_copy
def test_a_copy_goes_on_by_itself(copied):
    plain, ours = pair("NAdam")
    step_both(plain, ours, 2)
    twin, before = copied(ours), [w.clone() for w in masters_of(ours)]
    step_both(plain, twin, 2, first=2)
    assert_alike(plain, twin)
    assert_same(masters_of(ours), before)


@pytest.mark.parametrize("now", [torch.float32, torch.float64], ids=str)
def test_a_model_may_change_its_type(now):
    """torch's AdamW raises at the next step."""
    model = nn.Linear(8, 4).bfloat16()
    optimizer = SplitMasters(torch.optim.AdamW, model.parameters(), lr=0.01, weight_decay=0.0)
    for dtype in (torch.bfloat16, torch.bfloat16, now, now):
        before = model.to(dtype).weight.detach().clone()
        give(params_of(optimizer), [torch.ones_like(p) for p in params_of(optimizer)])
        optimizer.step()
        atol = 1e-2 if dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(model.weight.detach(), before - 0.01, rtol=0, atol=atol)
    assert set(optimizer.state[model.weight]) == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("from_plain", [False, True], ids=["own", "torch's"])
def test_a_loaded_optimizer_goes_on_by_itself(from_plain):
    """torch's classes share the tensors of a state dict that went through no file."""
    plain, ours = pair("NAdam")
    step_both(plain, ours, 2)
    _, loaded = pair("NAdam")
    loaded.load_state_dict((plain if from_plain else ours).state_dict())
    before = [{key: value.clone() for key, value in state.items()} for state in states(loaded)]
    step_both(plain, ours, 2, first=2)
    assert_same(states(loaded), before)


def test_a_closure_is_evaluated_once():
    calls = []
    p = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))

    def closure():
        calls.append(None)
        p.grad = None
        p.float().sum().backward()
        return 5.0

    assert SplitMasters(torch.optim.SGD, [p], chunk_bytes=2, lr=0.5).step(closure) == 5.0
    assert len(calls) == 1
    assert p.tolist() == [0.5] * 3


# --- errors -----------------------------------------------------------------------------------------------------------


class Foreign(torch.optim.SGD):
    """A class of a program."""


@pytest.mark.parametrize(
    ("arguments", "options", "error", "match"),
    [
        ((torch.optim.LBFGS,), {}, ampctx.AmpValueError, "LBFGS all of them as one"),
        ((torch.optim.SparseAdam,), {}, ampctx.AmpValueError, "SparseAdam sparse gradients"),
        ((Foreign,), {"lr": 0.1}, ampctx.AmpValueError, "which Foreign may not allow"),
        ((FusedAdam,), {}, ampctx.AmpValueError, "which FusedAdam may not allow"),
        (("NAdam",), {}, ampctx.AmpTypeError, "kind must be a class of torch.optim, .*, got 'NAdam'"),
        ((torch.optim.NAdam,), {"chunk_bytes": 0}, ampctx.AmpValueError, "chunk_bytes is 0"),
        ((torch.optim.NAdam,), {"chunk_bytes": 1e9}, ampctx.AmpTypeError, "chunk_bytes must be an int, got float"),
        ((torch.optim.NAdam,), {"differentiable": True}, ampctx.AmpValueError, "pass differentiable=False"),
        ((torch.optim.NAdam,), {"lr": -1.0}, ValueError, "Invalid learning rate"),
        ((torch.optim.NAdam,), {"weight_deacy": 0}, ampctx.AmpTypeError, "Did you mean weight_decay"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, options, error, match):
    with pytest.raises(error, match=match):
        SplitMasters(*arguments, parameters(torch.bfloat16), **options)


def test_fp16_is_refused_by_name():
    low, half = parameters(torch.bfloat16, [(3,)]), parameters(torch.float16, [(2,)])
    with pytest.raises(ampctx.AmpValueError, match=r"param_groups\[0\]\['params'\]\[1\] is torch.float16"):
        SplitMasters(torch.optim.NAdam, low + half)
    optimizer = SplitMasters(torch.optim.NAdam, low)
    with pytest.raises(ampctx.AmpValueError, match=r"param_groups\[1\]\['params'\]\[0\] is torch.float16"):
        optimizer.add_param_group({"params": half})
    assert params_of(optimizer) == low


def test_a_sparse_gradient_changes_nothing():
    _, ours = pair("NAdam")
    give(params_of(ours), gradients(params_of(ours), 0))
    params_of(ours)[2].grad = params_of(ours)[2].grad.to_sparse()
    before = [w.clone() for w in masters_of(ours)]
    with pytest.raises(ampctx.AmpError, match=r"SplitMasters does not support sparse gradients, .*\['params'\]\[2\]"):
        ours.step()
    assert_same(masters_of(ours), before)


@pytest.mark.parametrize("damaged", [lambda r: r.float(), lambda r: r[:1], lambda r: 3])
def test_a_damaged_remainder_is_refused_before_anything_changes(damaged):
    plain, ours = pair("NAdam")
    step_both(plain, ours, 2)
    state, before = copy.deepcopy(ours.state_dict()), copy.deepcopy(ours.state_dict())
    state["state"][0]["remainder"] = damaged(state["state"][0]["remainder"])
    with pytest.raises(ampctx.AmpValueError, match=r"'remainder' of param_groups\[0\].* (is of|has shape)"):
        ours.load_state_dict(state)
    assert_same(ours.state_dict()["state"], before["state"])
