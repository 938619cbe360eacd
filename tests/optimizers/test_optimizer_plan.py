"""A step sees what has changed since the step before."""

from __future__ import annotations

import copy
import gc
import weakref
from functools import partial

import pytest
import torch
from kit import assert_same, params_of, snapshot
from optimizer_cases import BY_NAME, CHANGES, give, gradients, make, parameters, run
from torch import nn

from ampctx._errors import AmpError
from ampctx.optimizers import FusedAdam, SplitMasters


def step_on(optimizer, step):
    """With gradients in the layout of the parameters, as autograd leaves them."""
    params = getattr(optimizer, "gives", params_of(optimizer))
    grads = zip(params, gradients(params, step), strict=True)
    give(params, [torch.empty_like(p).copy_(grad) for p, grad in grads])
    optimizer.step()


def anew(optimizer):
    """A copy, which knows nothing of earlier steps but their state."""
    copied = copy.deepcopy(optimizer)
    if hasattr(optimizer, "found_inf"):  # of which a copy has none
        copied.found_inf = optimizer.found_inf
    return copied


def same_as_copies(make, change=None, step_by=step_on, steps=6):
    """Steps an optimizer, and beside it a new copy for each step. ``change``: of both, before the fourth step."""
    kept, other = make(), make()
    for step in range(steps):
        other = anew(other)
        for optimizer in (kept, other):
            if step == 3 and change is not None:
                change(optimizer)
            torch.manual_seed(step)
            step_by(optimizer, step)
    assert_same(snapshot(kept), snapshot(other))


@pytest.mark.parametrize("mode", ["fp32", "bf16", "split"])  # bf16 rounds
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_steps_is_seen(change, mode):
    same_as_copies(lambda: make("adam", mode), CHANGES[change])


@pytest.mark.parametrize("what", ["sparse gradients, and param_groups", "lr must be 1-element: lr has 3 elements"])
@pytest.mark.parametrize("name", ["adam", "lamb"])
def test_what_is_refused_of_a_later_group_changes_nothing(name, what):
    optimizer = BY_NAME[name]([{"params": parameters()}, {"params": parameters(seed=1)}])
    run(optimizer, 3)
    before = snapshot(optimizer)
    give(params_of(optimizer), gradients(params_of(optimizer), 3))
    if "lr" in what:
        optimizer.param_groups[1]["lr"] = torch.ones(3)
    else:
        params_of(optimizer)[-1].grad = torch.ones(5, 4).to_sparse()
    with pytest.raises(AmpError, match=what):
        optimizer.step()
    assert_same(snapshot(optimizer), before)


def test_no_gradient_is_kept_and_nothing_outlives_the_optimizer():
    params = parameters()
    optimizer = FusedAdam(params)
    run(optimizer, 3)
    grad, state = weakref.ref(params[0].grad), weakref.ref(optimizer.state[params[0]]["exp_avg"])
    params[0].grad = None
    assert grad() is None
    optimizer.state[params[0]].pop("exp_avg")
    run(optimizer, 1)
    gc.collect()
    assert state() is None
    last = weakref.ref(optimizer.state[params[0]]["exp_avg"])
    gc.disable()
    try:
        del optimizer
        assert last() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("offset", [0, 5], ids=["", "a view"])
def test_memory_that_is_gone_between_steps_is_named(offset):
    params = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = FusedAdam(params)
    run(optimizer, 1)
    moment = optimizer.state[params[1]]["exp_avg"] = torch.zeros(3 + offset)[offset:]
    run(optimizer, 2)
    moment.untyped_storage().resize_(0)
    before = params[0].clone()
    with pytest.raises(RuntimeError, match=r"multi_tensor_adam: exp_avgs\[1\] has no memory"):
        run(optimizer, 1)
    assert torch.equal(params[0], before)


@pytest.mark.parametrize("options", [{}, {"master_weights": True}])
def test_a_gradient_beyond_its_storage_is_named(options):
    optimizer = FusedAdam([nn.Parameter(torch.ones(1000)) for _ in range(2)], **options)
    run(optimizer, 3)
    give(params_of(optimizer), gradients(params_of(optimizer), 3))
    params_of(optimizer)[1].grad.untyped_storage().resize_(64)
    before = snapshot(optimizer)
    with pytest.raises(RuntimeError, match=r"multi_tensor_adam: grads\[1\] has no memory"):
        optimizer.step()
    assert_same(snapshot(optimizer), before)


def test_finalizers_that_change_lists_and_state_while_a_step_reads_them():
    """They run where Python looks for cycles: at any allocation."""
    params, turns = parameters(), []
    optimizer = FusedAdam(params)
    group = optimizer.param_groups[0]["params"]

    class Changing:
        def __init__(self):
            self.itself = self

        def __del__(self):
            turns.append(None)
            if len(turns) % 2:
                group.append(group.pop(0))
                state = optimizer.state.get(group[0])
                if state:
                    state.update({key: value.clone() for key, value in state.items()})

    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for step in range(40):
            Changing()
            give(params, gradients(params, step))
            optimizer.step()
            optimizer.step()
    finally:
        gc.set_threshold(*thresholds)
    assert len(turns) == 40
    assert all(p.isfinite().all() and optimizer.state[p]["step"] == 80 for p in params if p.numel())


def test_a_parameter_of_a_subclass_is_stepped_as_one():
    optimizer = FusedAdam([type("Mine", (nn.Parameter,), {})(torch.ones(3))])
    run(optimizer, 3)
    plain = FusedAdam([nn.Parameter(torch.ones(3))])
    run(plain, 3)
    assert_same(snapshot(optimizer), snapshot(plain))


def test_a_model_is_converted_by_swaps_of_its_tensors():
    """torch swaps no tensor that C++ code refers to."""
    model = nn.Linear(3, 3)
    optimizer = FusedAdam(model.parameters())
    for step in range(3):
        give(list(model.parameters()), gradients(list(model.parameters()), step))
        optimizer.step()
    optimizer.zero_grad()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert model.weight.dtype == torch.float64


KEEPING = [{"master_weights": True}, {"master_weights": "split"}, {"write_back": "kahan"}]


@pytest.mark.parametrize("make", [*(partial(FusedAdam, **o) for o in KEEPING), partial(SplitMasters, torch.optim.Adam)])
def test_a_parameter_that_has_left_is_let_go(make):
    params = parameters(torch.bfloat16)
    optimizer = make(params)
    run(optimizer, 2)
    last = optimizer.param_groups[0]["params"].pop()
    optimizer.state.pop(last)
    left = weakref.ref(last)
    del params, last
    run(optimizer, 2)
    gc.collect()
    assert left() is None
