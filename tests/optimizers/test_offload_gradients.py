"""``offload_gradients=True``: gradients go to the host when they arrive, with the values that autograd gives them."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from kit import assert_same, params_of, snapshot
from torch import nn

import ampctx
from ampctx.amp import AmpSession
from ampctx.optimizers import FusedAdam, FusedSGD, _offload

X = torch.randn(6, 16, 8, generator=torch.Generator().manual_seed(0))
OFFLOAD = {"offload": "cpu", "offload_gradients": True}
WAYS = [OFFLOAD, {**OFFLOAD, "overlap": "forward"}]


@pytest.fixture(autouse=True)
def small_calls(monkeypatch):
    monkeypatch.setattr(_offload, "CALL_ELEMENTS", 20)


def make(dtype=torch.bfloat16, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).to(dtype)
    kept = {torch.bfloat16: "split", torch.float16: True}.get(dtype, False)
    return model, FusedAdam(model.parameters(), lr=0.01, master_weights=kept, **options)


def backward(model, i=0):
    model(X[i].to(next(model.parameters()).dtype)).float().square().mean().backward()


def iterate(model, optimizer, steps, micro=1, max_norm=None, of=None):
    norms = []
    for step in range(steps):
        for i in range(micro):
            backward(model, (step + i) % len(X))
        if max_norm is not None:
            norms.append(ampctx.clip_grad_norm_(model.parameters() if of is None else of, max_norm).clone())
        optimizer.step()
        optimizer.zero_grad()
    optimizer.wait()
    return norms


@pytest.mark.full(but=9)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("micro", [1, 2, 4])
def test_100_steps_over_micro_batches_with_clipping_are_the_same(way, dtype, micro):
    found = []
    for options in ({}, way):
        model, optimizer = make(dtype, **options)
        norms = iterate(model, optimizer, 100, micro, max_norm=0.05)
        found.append([*snapshot(optimizer), *norms])
    assert_same(*found)


def test_gradients_leave_the_device():
    model, _optimizer = make(**OFFLOAD)
    for _ in range(2):
        backward(model)
        assert all(p.grad is None for p in model.parameters())


def test_a_skip_and_an_unclipped_norm():
    found = []
    for options in ({}, OFFLOAD):
        model, optimizer = make(**options)
        iterate(model, optimizer, 1)
        for flag in (1.0, 0.0):
            backward(model)
            norm = ampctx.clip_grad_norm_(params_of(optimizer), 1e9)
            optimizer.found_inf = torch.tensor(flag)
            optimizer.step()
            optimizer.zero_grad()
        found.append([*snapshot(optimizer), norm])
    assert_same(*found)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_of_the_optimizer_drops_them(set_to_none):
    found = []
    for options in ({}, OFFLOAD):
        model, optimizer = make(**options)
        backward(model, 0)
        backward(model, 1)
        optimizer.zero_grad(set_to_none)
        backward(model, 2)
        optimizer.step()
        found.append(snapshot(optimizer))
    assert_same(*found)


def test_a_step_whose_gradients_were_zeroed_does_nothing():
    model, optimizer = make(**OFFLOAD)
    iterate(model, optimizer, 1)
    backward(model)
    before = snapshot(optimizer)
    optimizer.zero_grad()
    optimizer.step()
    assert_same(snapshot(optimizer), before)


def test_gradients_that_no_hook_takes_come_at_the_step():
    """Of parameters that were frozen, of a copied optimizer, and those that a program sets."""
    found = []
    for options in ({}, OFFLOAD):
        model, optimizer = make(**options)
        model[0].weight.requires_grad_(False)
        iterate(model, optimizer, 2, max_norm=0.05)
        model[0].weight.requires_grad_(True)
        iterate(model, optimizer, 2, max_norm=0.05)
        model, optimizer = copy.deepcopy((model, optimizer))
        iterate(model, optimizer, 2, max_norm=0.05)
        model[0].weight.grad = torch.ones_like(model[0].weight)
        optimizer.step()
        found.append(snapshot(optimizer))
    assert_same(*found)


def test_a_clip_of_some_parameters_and_of_others_without_offload():
    found = []
    for options in ({}, OFFLOAD):
        model, optimizer = make(**options)
        other = nn.Parameter(torch.ones(4))
        backward(model)
        other.grad = torch.full((4,), 3.0)
        norm = ampctx.clip_grad_norm_([other, *model[0].parameters()], 0.5)
        optimizer.step()
        found.append([*snapshot(optimizer), norm, other.grad])
    assert_same(*found)


def test_a_backward_into_gradients_of_the_step_before_is_refused():
    model, optimizer = make(**OFFLOAD)
    backward(model)
    optimizer.step()
    model.zero_grad()
    with pytest.raises(ampctx.AmpError, match=r"Call optimizer.zero_grad\(\) after each step"):
        backward(model)
    optimizer.zero_grad()
    iterate(model, optimizer, 1)


def test_a_gradient_beside_that_of_the_backward_is_refused():
    model, optimizer = make(**OFFLOAD)
    backward(model)
    before = [p.detach().clone() for p in model.parameters()]
    model[0].weight.grad = torch.ones_like(model[0].weight)
    with pytest.raises(ampctx.AmpError, match=r"shape \(8, 8\) was given a .grad"):
        optimizer.step()
    assert_same([p.detach() for p in model.parameters()], before)


def test_amp_refuses_it_before_it_changes_anything():
    model, optimizer = make(torch.float32, **OFFLOAD)
    with pytest.raises(ampctx.AmpError, match="FusedAdam has offload_gradients=True.*before amp can unscale"):
        AmpSession().initialize(model, optimizer, opt_level="O5", master_weights=False, verbosity=0)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("call", ["unscale_", "step"])
def test_ampctxs_grad_scaler_refuses_it(call):
    model, optimizer = make(**OFFLOAD)
    scaler = ampctx.GradScaler("cpu")
    scaler.scale(model(X[0].bfloat16()).float().sum()).backward()
    with pytest.raises(ampctx.AmpError, match=f"{call}.*: FusedAdam has offload_gradients=True"):
        getattr(scaler, call)(optimizer)


@pytest.mark.parametrize("unscale", [False, True])
def test_torchs_grad_scaler_is_refused_before_a_weight_changes(unscale):
    model, optimizer = make(**OFFLOAD)
    before = [p.detach().clone() for p in model.parameters()]
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(X[0].bfloat16()).float().sum()).backward()
    if unscale:
        scaler.unscale_(optimizer)
    with pytest.raises(ampctx.AmpError, match="GradScaler neither unscales nor checks"):
        scaler.step(optimizer)
    assert_same([p.detach() for p in model.parameters()], before)


def test_a_process_group_is_refused(tmp_path):
    model, optimizer = make(**OFFLOAD)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        with pytest.raises(ampctx.AmpError, match="In a process group pass offload_gradients=False"):
            make(**OFFLOAD)
        with pytest.raises(ampctx.AmpError, match="before DistributedDataParallel reduces them"):
            backward(model)
    finally:
        torch.distributed.destroy_process_group()
    del optimizer


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"offload_gradients": True}, ampctx.AmpValueError, "pass offload='cpu', too"),
        ({"offload": "cpu", "offload_gradients": "no"}, ampctx.AmpTypeError, "offload_gradients must be True or False"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, error, match):
    with pytest.raises(error, match=match):
        FusedSGD([nn.Parameter(torch.ones(2))], lr=0.1, **options)


def test_hooks_end_with_the_optimizer():
    model, optimizer = make(**OFFLOAD)
    del optimizer
    gc.collect()
    backward(model)
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.full
def test_memory_does_not_grow(only_new_objects):
    model, optimizer = make(**OFFLOAD)

    def tensors():
        gc.collect()
        return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())

    iterate(model, optimizer, 4, micro=2, max_norm=0.1)
    before = tensors()
    iterate(model, optimizer, 20, micro=2, max_norm=0.1)
    assert tensors() == before
