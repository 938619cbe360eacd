"""FP16_Optimizer of apex.fp16_utils and of apex.contrib.optimizers: one implementation, two faces."""

import copy
import logging
import math
import pickle
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from apex import amp, optimizers
from apex.contrib import optimizers as contrib
from apex.fp16_utils import FP16_Optimizer
from kit import assert_same, batch, params_of, through_a_file
from torch import nn

import ampctx

DYNAMIC = {"dynamic_loss_scale": True}
each_face = pytest.mark.parametrize("face", [FP16_Optimizer, contrib.FP16_Optimizer], ids=["fp16_utils", "contrib"])


def make_model(dtype=torch.float16):
    """Two 16-bit layers and an fp32 batch norm between them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).to(dtype)
    model[1].float()
    return model


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def made(face, make, **arguments):
    """A model and its wrapped optimizer."""
    model = make_model()
    return model, face(make(model.parameters()), **arguments)


of_fp16_utils = partial(made, FP16_Optimizer, sgd)
of_contrib = partial(made, contrib.FP16_Optimizer, contrib.FusedAdam)


def loss_of(model, seed=0, factor=1.0):
    x = batch(seed, 5, 3).to(model[0].weight.dtype)
    return (model[2](model[1](model[0](x).float()).to(x.dtype)).float() * factor).pow(2).mean()


def run(model, optimizer, steps=3):
    for step in range(steps):
        optimizer.zero_grad()
        optimizer.backward(loss_of(model, step))
        optimizer.step()


def tensors_of(value):
    return [t.detach().clone() for t in value]


# --- masters ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_parameters_get_masters_and_the_rest_is_stepped_as_it_is(dtype):
    model = make_model(dtype)
    model[2].bias.requires_grad_(False)
    inner = sgd([{"params": model[0].parameters()}, {"params": [*model[1].parameters(), *model[2].parameters()]}])
    optimizer = FP16_Optimizer(inner)
    assert optimizer.optimizer is inner
    assert optimizer.fp16_groups == [[model[0].weight, model[0].bias], [model[2].weight]]
    assert optimizer.fp32_from_fp32_groups == [[], [model[1].weight, model[1].bias]]
    masters = optimizer.fp32_from_fp16_groups
    assert [len(group) for group in masters] == [2, 1]
    for p, m in zip(optimizer.all_fp16_params, optimizer.all_fp32_from_fp16_params, strict=True):
        assert (m.dtype, m.requires_grad) == (torch.float32, True)
        assert torch.equal(m, p.float())
    assert inner.param_groups[0]["params"] == masters[0]
    assert inner.param_groups[1]["params"] == [*model[1].parameters(), masters[1][0], model[2].bias]
    assert optimizer.all_fp32_from_fp32_params == [model[1].weight, model[1].bias]


@pytest.mark.parametrize("arguments", [{}, {"static_loss_scale": 128.0}, DYNAMIC], ids=["1", "128", "dynamic"])
@pytest.mark.parametrize(
    "make",
    [
        sgd,
        lambda p: optimizers.FusedSGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, lr=0.01),
        lambda p: contrib.FusedAdam(p, lr=0.1, weight_decay=0.1),
    ],
    ids=["sgd", "fused-sgd", "adam", "old-adam"],
)
@each_face
def test_training_is_that_of_the_masters_by_hand(face, arguments, make):
    model, twin = make_model(), make_model()
    optimizer = face(make(model.parameters()), **arguments)
    masters = [p.detach().float().requires_grad_() for p in twin.parameters()]
    reference = make(masters)
    for step in range(3):
        optimizer.zero_grad()
        optimizer.backward(loss_of(model, step))
        optimizer.step()
        twin.zero_grad()
        (loss_of(twin, step) * optimizer.loss_scale).backward()
        for p, m in zip(twin.parameters(), masters, strict=True):
            m.grad = p.grad.float() / optimizer.loss_scale
        reference.step()
        with torch.no_grad():
            for p, m in zip(twin.parameters(), masters, strict=True):
                p.copy_(m)
    assert not optimizer.overflow
    assert_same(tensors_of(model.parameters()), tensors_of(twin.parameters()))
    assert_same([p.detach() for g in optimizer.param_groups for p in g["params"]], tensors_of(masters))


def test_losses_add_up_when_the_masters_wait():
    model, optimizer = of_fp16_utils(static_loss_scale=8.0)
    loss = loss_of(model)
    optimizer.backward(loss, update_master_grads=False, retain_graph=True)
    assert optimizer.all_fp32_from_fp16_params[0].grad is None
    optimizer.backward(loss, update_master_grads=False)
    optimizer.update_master_grads()
    twice = tensors_of([p.grad for p in params_of(optimizer)])
    optimizer.zero_grad()
    optimizer.backward(loss_of(model))
    for a, b in zip(twice, [p.grad for p in params_of(optimizer)], strict=True):
        assert torch.equal(a, 2 * b)


def test_what_has_no_gradient_is_not_stepped():
    model, optimizer = of_fp16_utils(**DYNAMIC, dynamic_loss_args={"init_scale": 4.0})
    before = tensors_of(model.parameters())
    optimizer.update_master_grads()
    optimizer.step()
    assert not optimizer.overflow
    assert_same(tensors_of(model.parameters()), before)
    optimizer.backward(loss_of(model))
    # The model's own, which does not reach the masters.
    model.zero_grad()
    optimizer.backward(model[2](torch.ones(1, 4).half()).sum())
    optimizer.step()
    assert optimizer.fp32_from_fp16_groups[0][0].grad is None
    assert torch.equal(model[0].weight, before[0])
    assert not torch.equal(model[2].weight, before[4])


# --- the scale --------------------------------------------------------------------------------------------------------


def test_a_static_scale_is_read_and_assigned_and_does_not_look():
    model, optimizer = of_fp16_utils(static_loss_scale=128)
    assert (optimizer.loss_scale, optimizer.dynamic_loss_scale) == (128.0, False)
    assert optimizer.loss_scaler.loss_scale() == optimizer.loss_scaler._loss_scale == 128.0
    optimizer.loss_scale = 4
    assert optimizer.loss_scale == optimizer.loss_scaler.loss_scale() == 4.0
    with pytest.raises(ampctx.AmpValueError, match="loss_scale is 0.0"):
        optimizer.loss_scale = 0
    optimizer.backward(loss_of(model, factor=math.nan))
    optimizer.step()
    assert optimizer.overflow is False
    assert model[0].weight.isnan().all()


@pytest.mark.parametrize("bad", [math.inf, math.nan], ids=str)
@pytest.mark.parametrize(
    ("make", "arguments", "after"),
    [(of_fp16_utils, DYNAMIC, 2.0**15), (of_contrib, DYNAMIC, 2.0**15), (of_contrib, {"static_loss_scale": 8.0}, 8.0)],
    ids=["fp16_utils", "contrib", "contrib-static"],
)
def test_an_overflow_skips_the_step_and_halves_a_dynamic_scale(make, arguments, after, bad, caplog):
    model, optimizer = make(**arguments)
    before = tensors_of(model.parameters())
    optimizer.backward(loss_of(model, factor=bad))
    if make is of_fp16_utils:
        assert optimizer.overflow is True
        assert optimizer.clip_master_grads(1.0) == -1
    with caplog.at_level(logging.WARNING, logger="ampctx"):
        assert optimizer.step() is None
    assert caplog.messages[0] == f"Gradient overflow.  Skipping step, reducing loss scale to {after}"
    assert (optimizer.overflow, optimizer.loss_scale) == (True, after)
    assert make is of_fp16_utils or (optimizer.cur_iter, optimizer.cur_scale) == (1, after)
    assert_same(tensors_of(model.parameters()), before)
    assert not optimizer.state
    run(model, optimizer, 1)
    assert optimizer.overflow is False
    assert not torch.equal(model[0].weight, before[0])


# --- closures ---------------------------------------------------------------------------------------------------------


def test_later_calls_of_a_closure_see_the_weights_that_the_optimizer_has_moved():
    model = make_model()
    seen = []
    optimizer = FP16_Optimizer(torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3))

    def closure():
        seen.append(model[0].weight.clone())
        assert torch.equal(optimizer.all_fp32_from_fp16_params[0].half(), seen[-1])
        optimizer.zero_grad()
        optimizer.backward(loss := loss_of(model))
        return loss

    optimizer.step(closure)
    assert len(seen) > 1
    assert not torch.equal(seen[0], seen[-1])


def test_a_closure_runs_again_while_it_overflows(caplog):
    model = make_model()
    factors = [math.inf, math.inf, 1.0]
    optimizer = FP16_Optimizer(sgd(model.parameters()), **DYNAMIC)
    # A flag of before says nothing about what the closure will find.
    optimizer.overflow = True

    def closure():
        optimizer.zero_grad()
        optimizer.backward(loss := loss_of(model, factor=factors.pop(0)))
        return loss

    with caplog.at_level(logging.WARNING, logger="ampctx"):
        loss = optimizer.step(closure)
    assert loss.isfinite()
    assert factors == []
    assert optimizer.loss_scale == 2.0**14
    assert [message.rpartition(" ")[2] for message in caplog.messages] == ["32768.0", "16384.0"]
    assert model[0].weight.isfinite().all()


def test_a_closure_that_overflows_at_every_scale_is_an_error():
    model = make_model()
    arguments = {"init_scale": 4.0, "min_loss_scale": 2.0}
    optimizer = FP16_Optimizer(sgd(model.parameters()), dynamic_loss_scale=True, dynamic_loss_args=arguments)
    before = tensors_of(model.parameters())

    def closure():
        optimizer.backward(loss := loss_of(model, factor=math.inf))
        return loss

    with pytest.raises(ampctx.AmpError, match="overflow at the lowest loss scale, 2.0, too"):
        optimizer.step(closure)
    assert optimizer.first_closure_call_this_step
    assert_same(tensors_of(model.parameters()), before)


# --- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_type", [2, math.inf], ids=["l2", "inf"])
def test_clip_master_grads(norm_type):
    model, optimizer = of_fp16_utils(static_loss_scale=16.0)
    optimizer.backward(loss_of(model))
    grads = torch.cat([g.flatten() for g in [p.grad for p in params_of(optimizer)]])
    norm = optimizer.clip_master_grads(0.01, norm_type=norm_type)
    torch.testing.assert_close(norm, torch.linalg.vector_norm(grads, norm_type))
    clipped = torch.cat([g.flatten() for g in [p.grad for p in params_of(optimizer)]])
    torch.testing.assert_close(clipped, grads * 0.01 / (norm + 1e-6))


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [{"static_loss_scale": 8.0}, DYNAMIC], ids=["static", "dynamic"])
@each_face
def test_a_run_goes_on_from_a_checkpoint_as_if_nothing_had_been(face, arguments):
    model, optimizer = made(face, sgd, **arguments)
    run(model, optimizer)
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    resumed = make_model()
    other = face(sgd(resumed.parameters()), **arguments)
    resumed.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    for count in ("_unskipped", "cur_iter"):
        assert getattr(other.loss_scaler, count, 0) == getattr(optimizer.loss_scaler, count, 0)
    run(model, optimizer)
    run(resumed, other)
    assert_same(tensors_of(resumed.parameters()), tensors_of(model.parameters()))
    assert_same(tensors_of(other.all_fp32_from_fp16_params), tensors_of(optimizer.all_fp32_from_fp16_params))
    assert other.loss_scale == optimizer.loss_scale


def test_the_state_dict_has_apex_keys():
    optimizer = of_fp16_utils(**DYNAMIC)[1]
    state = optimizer.state_dict()
    assert set(state) == {
        *("loss_scaler", "dynamic_loss_scale", "overflow", "first_closure_call_this_step", "optimizer_state_dict"),
        "fp32_from_fp16",
    }
    flags = ("dynamic_loss_scale", "overflow", "first_closure_call_this_step")
    assert [state[name] for name in flags] == [True, False, True]
    assert state["loss_scaler"].loss_scale() == 2.0**16
    assert type(state["loss_scaler"]).__module__ == "apex.amp.scaler"
    assert [[type(m) for m in group] for group in state["fp32_from_fp16"]] == [[torch.Tensor] * 4]
    # It tells what was, whatever comes.
    optimizer.loss_scale = 2.0
    assert state["loss_scaler"].loss_scale() == 2.0**16


@pytest.mark.parametrize(
    "scaler",
    [
        SimpleNamespace(dynamic=True, _loss_scale=64.0, _unskipped=7, _scale_seq_len=10, _max_loss_scale=128.0),
        SimpleNamespace(cur_scale=64.0, cur_iter=18, last_overflow_iter=10, scale_factor=2.0, scale_window=10),
        {"loss_scale": 64.0, "unskipped": 7, "scale_window": 10},
    ],
    ids=["apex.amp", "fp16_utils", "dict"],
)
def test_loss_scalers_of_all_ages_load(scaler):
    model, optimizer = of_fp16_utils()
    optimizer.load_state_dict({**optimizer.state_dict(), "loss_scaler": scaler, "dynamic_loss_scale": True})
    assert (optimizer.loss_scale, optimizer.dynamic_loss_scale) == (64.0, True)
    scales = []
    for _ in range(3):
        optimizer.zero_grad()
        optimizer.backward(loss_of(model))
        scales.append(optimizer.loss_scale)
    assert scales == [64.0, 64.0, 128.0]


BAD = {
    "no-scaler": (lambda s: s.pop("loss_scaler"), 'has no "loss_scaler"'),
    "no-masters": (lambda s: s.pop("fp32_from_fp16"), 'has no "fp32_from_fp16"'),
    "few": (lambda s: s["fp32_from_fp16"][0].pop(), r"\[0\] has masters of shapes \[\(4, 3\), \(4,\), \(2, 4\)\]"),
    "optimizer": (lambda s: s["optimizer_state_dict"]["param_groups"].clear(), "different number of parameter groups"),
}
BAD_OF_CONTRIB = {
    "no-scale": (lambda s: s.pop("cur_scale"), 'has no "cur_scale"'),
    "masters": (lambda s: s["fp32_groups"][0].pop(), r"\['fp32_groups'\]\[0\] has masters of shapes"),
}


@pytest.mark.parametrize(
    ("make", "change", "message"),
    [*((of_fp16_utils, *bad) for bad in BAD.values()), *((of_contrib, *bad) for bad in BAD_OF_CONTRIB.values())],
    ids=[*BAD, *BAD_OF_CONTRIB],
)
def test_a_bad_checkpoint_changes_nothing(make, change, message):
    model, optimizer = make(**DYNAMIC)
    run(model, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    for master in state["fp32_from_fp16" if make is of_fp16_utils else "fp32_groups"][0]:
        master.fill_(9.0)
    if make is of_contrib:
        state["cur_scale"] = 2.0
    change(state)
    before = tensors_of(optimizer.all_fp32_from_fp16_params)
    with pytest.raises((ampctx.AmpError, ValueError), match=message):
        optimizer.load_state_dict(state)
    assert optimizer.loss_scale == 2.0**16
    assert_same(tensors_of(optimizer.all_fp32_from_fp16_params), before)


# --- what it refuses --------------------------------------------------------------------------------------------------


CANNOT = "cannot be pickled or copied: save its state_dict"
NO_OPTIMIZER = "must be an optimizer to wrap, got"
REFUSED = {
    "pickle": (lambda: pickle.dumps(of_fp16_utils()[1]), RuntimeError, CANNOT),
    "deepcopy": (lambda: copy.deepcopy(of_fp16_utils()[1]), RuntimeError, CANNOT),
    "unpickle": (lambda: FP16_Optimizer.__new__(FP16_Optimizer).__setstate__({}), RuntimeError, "cannot be unpickled"),
    "module": (lambda: FP16_Optimizer(nn.Linear(1, 1)), TypeError, f"{NO_OPTIMIZER} Linear"),
    "itself": (lambda: FP16_Optimizer(of_fp16_utils()[1]), TypeError, f"{NO_OPTIMIZER} FP16_Optimizer"),
    "loss": (lambda: of_fp16_utils()[1].backward(1.0), TypeError, "loss must be a tensor, got float"),
    "state": (lambda: of_fp16_utils()[1].load_state_dict([]), TypeError, "state_dict must be a dict, got list"),
    "closure": (lambda: of_contrib()[1].step(int), NotImplementedError, "takes no closure: use apex.fp16_utils.FP16_O"),
}


@pytest.mark.parametrize(("call", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_it_refuses(call, error, message):
    with pytest.raises(error, match=message) as caught:
        call()
    assert isinstance(caught.value, ampctx.AmpError)


@pytest.mark.parametrize("in_list", [False, True], ids=["alone", "in-a-list"])
@each_face
def test_amp_initialize_says_why_it_does_not_take_one(face, in_list):
    model = nn.Linear(2, 2)
    optimizer = face(sgd(model.parameters()))
    with pytest.raises(RuntimeError, match=f"instance of {face.__module__}.FP16_Optimizer. It keeps fp32 masters"):
        amp.initialize(model, [optimizer] if in_list else optimizer, verbosity=0)


# --- that of apex.contrib.optimizers ----------------------------------------------------------------------------------


def test_its_backward_leaves_scaled_gradients_which_step_consumes():
    model = make_model()
    optimizer = contrib.FP16_Optimizer(contrib.FusedSGD(model.parameters(), lr=0.1), static_loss_scale=4.0)
    optimizer.backward(model[0](torch.ones(1, 3).half()).sum())
    assert torch.equal(model[0].bias.grad, torch.full((4,), 4.0).half())
    assert all(m.grad is None for m in optimizer.all_fp32_from_fp16_params)
    before = model[0].bias.clone()
    optimizer.step()
    assert torch.equal(model[0].bias, (before.float() - 0.1).half())
    assert all(m.grad is None for m in optimizer.all_fp32_from_fp16_params)
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    optimizer.backward(loss_of(model))
    optimizer.zero_grad(set_grads_to_None=False)
    assert torch.equal(model[0].bias.grad, torch.zeros(4).half())


def test_its_dynamic_scale_grows_after_its_window_and_is_assigned():
    model, optimizer = of_contrib(**DYNAMIC, dynamic_loss_args={"init_scale": 4.0, "scale_window": 2})
    scales = []
    for step in range(4):
        run(model, optimizer, steps=1)
        scales.append(optimizer.cur_scale)
        assert optimizer.cur_iter == step + 1
    assert scales == [4.0, 8.0, 8.0, 16.0]
    assert (optimizer.last_overflow_iter, optimizer.scale_factor, optimizer.scale_window) == (-1, 2.0, 2)
    default = of_contrib(**DYNAMIC)[1]
    assert (default.cur_scale, default.scale_window) == (2.0**16, 1000)
    optimizer.cur_scale = 64.0
    assert optimizer.loss_scale == optimizer.loss_scaler.cur_scale == 64.0
    optimizer.loss_scale = 32.0
    assert optimizer.cur_scale == 32.0
    with pytest.raises(ampctx.AmpValueError, match="loss_scale is -1.0"):
        optimizer.loss_scale = -1


def test_its_state_dict_has_apex_keys_and_flat_masters_load():
    model, optimizer = of_contrib(**DYNAMIC)
    run(model, optimizer)
    state = optimizer.state_dict()
    assert state.keys() == {
        *("dynamic_loss_scale", "cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window"),
        *("optimizer_state_dict", "fp32_groups"),
    }
    static = of_contrib()[1].state_dict()
    assert state.keys() - static.keys() == {"last_overflow_iter", "scale_factor", "scale_window"}
    masters = [m.clone() for m in state["fp32_groups"][0]]
    state["fp32_groups_flat"] = [torch.cat([m.flatten() for m in state.pop("fp32_groups")[0]])]
    other = of_contrib(**DYNAMIC)[1]
    other.load_state_dict(through_a_file(state))
    assert_same(tensors_of(other.fp32_groups[0]), masters)
