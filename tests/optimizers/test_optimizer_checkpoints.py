"""Checkpoints of ours, of torch.optim and of apex; copies and pickles."""

from __future__ import annotations

import io
import re
from functools import partial

import pytest
import torch
from kit import COPIES, assert_same, params_of, snapshot
from kit import through_a_file as saved
from optimizer_cases import BY_NAME, SHAPES, STATE, like, make, parameters, run
from torch import nn

from ampctx._errors import AmpKeyError, AmpValueError
from ampctx.optimizers import FusedAdagrad, FusedAdam, FusedNovoGrad, FusedSGD, SplitMasters


@pytest.mark.parametrize("name", BY_NAME)
def test_loaded_state_is_fp32_in_the_layout_of_the_parameter_and_a_copy(name):
    source = BY_NAME[name](parameters(torch.bfloat16, [(3, 5), (5, 4)] if name == "muon" else SHAPES))
    run(source, 1)
    target = BY_NAME[name]([nn.Parameter(p.detach().contiguous()) for p in params_of(source)])
    target.load_state_dict(source.state_dict())
    assert not any(t.requires_grad for s in target.state.values() for t in s.values())
    for p, q in zip(params_of(source), params_of(target), strict=True):
        for key in STATE[name]:
            mine, theirs = target.state[q][key], source.state[p][key]
            assert mine.dtype == torch.float32
            assert mine.stride() == (q.stride() if mine.shape == q.shape else ())
            assert mine.numel() == 0 or mine.data_ptr() != theirs.data_ptr()
            assert_same([mine], [theirs])
        assert target.state[q]["step"].shape == ()


# --- torch.optim ------------------------------------------------------------------------------------------------------

ADAM = partial(FusedAdam, adam_w_mode=False)
TWINS = {
    "adam": (ADAM, torch.optim.Adam, {}),
    "adam-amsgrad": (ADAM, torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    "adam-fused": (ADAM, partial(torch.optim.Adam, fused=True), {}),
    "adamw": (FusedAdam, torch.optim.AdamW, {"weight_decay": 0.1}),
    "sgd": (FusedSGD, torch.optim.SGD, {"lr": 0.01}),
    "sgd-dampening": (FusedSGD, torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "dampening": 0.5}),
    "adagrad": (FusedAdagrad, torch.optim.Adagrad, {"weight_decay": 0.1}),
}


@pytest.mark.parametrize("trained_by", ["torch", "ours"])
@pytest.mark.parametrize("name", TWINS)
def test_checkpoints_go_over_to_torch_and_back(name, trained_by):
    *kinds, options = TWINS[name]
    ours, theirs = (partial(kind, **options) for kind in kinds)
    first, second = (theirs, ours) if trained_by == "torch" else (ours, theirs)
    # torch's fused kernels on the CPU (2.13) mix up gradients of another layout than the parameter's.
    trained = first(parameters(shapes=SHAPES[:5] if name == "adam-fused" else SHAPES))
    run(trained, 3)
    goes_on = second(like(trained))
    goes_on.load_state_dict(saved(trained.state_dict()))
    if trained_by == "torch" and name != "sgd":
        # torch.optim.SGD keeps no count; where there is a buffer, the first step is over.
        assert {s["step"].item() for s in goes_on.state.values()} == {1 if name == "sgd-dampening" else 3}
    run(trained, 3, first=3)
    run(goes_on, 3, first=3)
    torch.testing.assert_close(params_of(goes_on), params_of(trained), rtol=1e-6, atol=1e-7)


def test_adagrads_lr_decay_is_refused_and_nothing_loaded():
    theirs = torch.optim.Adagrad(parameters(), lr=0.5, lr_decay=0.1)
    run(theirs, 1)
    optimizer = FusedAdagrad(parameters())
    run(optimizer, 1)
    before, lr = snapshot(optimizer), optimizer.param_groups[0]["lr"]
    with pytest.raises(AmpValueError, match="lr_decay is 0.1, and FusedAdagrad has none: use an LR scheduler"):
        optimizer.load_state_dict(theirs.state_dict())
    assert_same(snapshot(optimizer), before)
    assert optimizer.param_groups[0]["lr"] == lr


# --- apex -------------------------------------------------------------------------------------------------------------


def as_apex_saves(optimizer, dtype, step):
    """The step count in the group, all state in the parameters' dtype."""
    checkpoint = saved(optimizer.state_dict())
    for state in checkpoint["state"].values():
        state.pop("step")
        state.update({k: v.to(dtype) for k, v in state.items()})
    for group in checkpoint["param_groups"]:
        for added in ("maximize", "seed", "lr_decay", "amsgrad"):
            group.pop(added, None)
        group["step"] = step
    return checkpoint


@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_apexs_state_in_half_is_taken_over_in_fp32(name):
    optimizer = BY_NAME[name](parameters(torch.float16))
    run(optimizer, 3)
    resumed = BY_NAME[name](like(optimizer))
    given = as_apex_saves(optimizer, torch.float16, None)
    del given["param_groups"][0]["step"]
    resumed.load_state_dict(given)
    (key,) = STATE[name]
    for index, p in enumerate(params_of(resumed)):
        assert_same([resumed.state[p][key]], [given["state"][index][key].float()])
    run(optimizer, 1, first=3)
    run(resumed, 1, first=3)
    for p, q in zip(params_of(optimizer), params_of(resumed), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-3, atol=2e-3)


def test_apexs_novograd_norms_of_the_group_go_to_the_parameters():
    """Two tensors for a group: the norms of its fp16 parameters, then those of the others."""
    params = [p for pair in zip(parameters(torch.float16), parameters(seed=1), strict=True) for p in pair]
    optimizer = FusedNovoGrad(params, lr=0.01)
    run(optimizer, 3)
    given = as_apex_saves(optimizer, torch.float32, 3)
    norms = {dtype: [] for dtype in (torch.float16, torch.float32)}
    for index, p in enumerate(params):
        norms[p.dtype].append(given["state"][index].pop("exp_avg_sq"))
    given["param_groups"][0]["exp_avg_sq"] = [torch.stack(values) for values in norms.values()]
    resumed = FusedNovoGrad(like(optimizer), lr=0.01)
    resumed.load_state_dict(given)
    assert_same(snapshot(resumed), snapshot(optimizer))
    given["param_groups"][0]["exp_avg_sq"][0] = torch.ones(2)
    with pytest.raises(AmpValueError, match="exp_avg_sq of a param group holds 2 norms for 7 parameters"):
        resumed.load_state_dict(given)
    assert_same(snapshot(resumed), snapshot(optimizer))


# --- what does not fit ------------------------------------------------------------------------------------------------


def test_state_that_the_write_back_has_no_use_for_is_left_out():
    for mode, key in {"masters": "master_param", "split": "remainder", "kahan": "compensation"}.items():
        optimizer = make("adam", mode)
        run(optimizer, 1)
        assert key in optimizer.state[params_of(optimizer)[0]]
        plain = BY_NAME["adam"](like(optimizer))
        plain.load_state_dict(optimizer.state_dict())
        assert plain.state[params_of(plain)[0]].keys() == {"step"} | STATE["adam"]
        run(plain, 1)


def test_unknown_state_is_carried_along_and_named(caplog):
    optimizer = BY_NAME["adam"](parameters())
    run(optimizer, 1)
    checkpoint = optimizer.state_dict()
    optimizer.load_state_dict(checkpoint)
    assert caplog.text == ""
    checkpoint["state"] = {**checkpoint["state"], "note": 5}
    checkpoint["state"][0]["flag"] = torch.tensor([1, 2])
    checkpoint["state"][0]["word"] = "x"
    checkpoint["state"][0]["absent"] = None
    resumed = BY_NAME["adam"](like(optimizer))
    resumed.load_state_dict(checkpoint)
    state = resumed.state[params_of(resumed)[0]]
    assert resumed.state["note"] == 5
    assert (state["flag"].tolist(), state["word"], "absent" in state) == ([1, 2], "x", False)
    assert re.search(r"FusedAdam: the state of .* has flag.*, which no step reads", caplog.text), caplog.text


def test_hooks_see_whole_checkpoints_and_fp32_state():
    optimizer = BY_NAME["adam"](parameters(torch.float16))
    run(optimizer, 2)
    resumed = BY_NAME["adam"](like(optimizer))
    seen = []

    def before(opt, given):
        seen.append(len(given["state"]))
        return {**given, "param_groups": [{**g, "lr": 0.25} for g in given["param_groups"]]}

    def after(opt):
        seen.append({s["exp_avg"].dtype for s in opt.state.values()})

    resumed.register_load_state_dict_pre_hook(before)
    resumed.register_load_state_dict_post_hook(after)
    resumed.register_state_dict_post_hook(lambda opt, found: {**found, "by": "hook"})
    resumed.load_state_dict(optimizer.state_dict())
    assert seen == [len(params_of(optimizer)), {torch.float32}]
    assert resumed.param_groups[0]["lr"] == 0.25
    resumed.register_state_dict_pre_hook(lambda opt: opt.state.update(note=1))
    assert (resumed.state_dict()["by"], resumed.state_dict()["state"]["note"]) == ("hook", 1)
    BY_NAME["adam"](like(optimizer)).load_state_dict(resumed.state_dict())


@pytest.mark.parametrize("lr", [0.25, torch.tensor(0.25), torch.tensor([0.25], dtype=torch.float64)], ids=str)
def test_loading_fills_the_lr_tensor_of_a_capturable_optimizer(lr):
    for name in ("adam", "lamb"):
        optimizer, source = (BY_NAME[name](parameters(), capturable=True, **given) for given in ({}, {"lr": lr}))
        kept = optimizer.param_groups[0]["lr"]
        optimizer.load_state_dict(source.state_dict())
        assert optimizer.param_groups[0]["lr"] is kept
        assert kept.item() == 0.25
        run(optimizer, 1)
        assert optimizer.param_groups[0]["lr"] is kept
        assert source.param_groups[0]["lr"] is not kept


def test_loading_fills_no_lr_tensor_twice():
    """Groups that were given one tensor between them have different rates in the checkpoint."""
    rates = [{"params": parameters(), "lr": 0.5}, {"params": parameters(), "lr": 0.25}]
    source, target = FusedAdam(rates, capturable=True), FusedAdam([{**group} for group in rates], capturable=True)
    target.param_groups[1]["lr"] = shared = target.param_groups[0]["lr"]
    target.load_state_dict(source.state_dict())
    assert [group["lr"].item() for group in target.param_groups] == [0.5, 0.25]
    assert target.param_groups[0]["lr"] is shared


@pytest.mark.parametrize("name", [name for name in BY_NAME if name != "muon"])  # whose groups are made anew
def test_an_empty_group_of_a_checkpoint_may_lack_options(name):
    """As torch's get_optimizer_state_dict leaves them."""
    optimizers = []
    for lr in (0.5, 0.25):
        optimizer = BY_NAME[name]([{"params": []}, {"params": parameters(shapes=[(3, 1)])}], lr=0.1)
        optimizer.param_groups[0]["lr"] = lr
        optimizers.append(optimizer)
    run(optimizers[0], 2)
    given = optimizers[0].state_dict()
    given["param_groups"][0] = {"params": []}
    optimizers[1].load_state_dict(given)
    assert [float(group["lr"]) for group in optimizers[1].param_groups] == pytest.approx([0.25, 0.1])
    run(optimizers[1], 1)


def split_masters(params):
    return SplitMasters(torch.optim.AdamW, params)


@pytest.mark.parametrize("kind", [FusedAdam, split_masters])
def test_state_of_a_parameter_that_was_exchanged_is_named(kind):
    """A framework that puts other tensors into the groups may forget the state."""
    (old,), (new,) = parameters(shapes=[(3, 1)]), parameters(shapes=[(3, 1)])
    optimizer = kind([old])
    run(optimizer, 1)
    optimizer.param_groups[0]["params"][0] = new
    with pytest.raises(AmpKeyError, match=r"has state of a parameter of shape \(3, 1\) that is in no group"):
        optimizer.state_dict()
    optimizer.state[new] = optimizer.state.pop(old)
    assert optimizer.state_dict()["state"][0]["step"] == 1


# --- copies -----------------------------------------------------------------------------------------------------------


def by_file(optimizer):
    file = io.BytesIO()
    torch.save(optimizer, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


COPIES = {**COPIES, "torch.save": by_file}


@pytest.mark.full(but=24)
@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("mode", ["fp32", "masters", "split", "stochastic"])
@pytest.mark.parametrize("name", BY_NAME)
def test_copies_train_on_by_themselves(name, mode, copied):
    optimizer = make(name, mode)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    run(optimizer, 2)
    optimizer.register_step_post_hook(lambda *_: pytest.fail("hooks stay behind, as in torch"))
    optimizer.note = "mine"
    other = copied(optimizer)
    optimizer._optimizer_step_post_hooks.clear()
    assert other.note == "mine"
    assert "step" in vars(optimizer), "the scheduler is expected to replace step"
    assert "step" not in vars(other)
    before = snapshot(optimizer)
    run(other, 2, first=2)
    assert_same(snapshot(optimizer), before)
    run(optimizer, 2, first=2)
    assert_same(snapshot(optimizer), snapshot(other))
    scheduler.step()
    assert other.param_groups[0]["lr"] != optimizer.param_groups[0]["lr"]


def test_state_of_old_checkpoints_without_counts_begins_at_0():
    optimizer = FusedAdam(parameters())
    checkpoint = optimizer.state_dict()
    p = params_of(optimizer)[0]
    checkpoint["state"] = {0: {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}}
    optimizer.load_state_dict(checkpoint)
    run(optimizer, 1)
    assert optimizer.state[p]["step"] == 1
