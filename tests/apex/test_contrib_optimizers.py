"""apex.contrib.optimizers, and the names in apex.optimizers besides the classes of ampctx.optimizers."""

import importlib
import io
import math

import pytest
import torch
from apex import amp
from apex import optimizers as apex_optimizers
from apex.contrib.optimizers import FP16_Optimizer, FusedAdam, FusedSGD
from torch import nn

import ampctx
from ampctx import optimizers

SHAPES = [(3, 4), (5,)]


def params_of(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def grads_of(step, dtype=torch.float16, factor=1.0):
    generator = torch.Generator().manual_seed(100 + step)
    return [(torch.randn(shape, generator=generator).to(dtype).float() * factor).to(dtype) for shape in SHAPES]


def values(params):
    return [p.detach().clone() for p in params]


def assert_same(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=0)


def stepped(optimizer, params, steps=3, factor=1.0):
    """The parameters after ordinary steps on fp32 gradients."""
    for step in range(steps):
        for p, g in zip(params, grads_of(step), strict=True):
            p.grad = g.float() * factor
        optimizer.step()
    return values(params)


OLD = {
    "adam": (
        # Where the old formula is that of today.
        lambda p: FusedAdam(p, lr=0.1, weight_decay=0.1, bias_correction=False),
        lambda p: optimizers.FusedAdam(p, lr=0.1, weight_decay=0.1, bias_correction=False),
    ),
    "sgd": (
        lambda p: FusedSGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
        lambda p: optimizers.FusedSGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    ),
}
both = pytest.mark.parametrize(("old", "new"), OLD.values(), ids=OLD)


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "name"),
    [
        *(("fused_adam", "FusedAdam"), ("fused_sgd", "FusedSGD"), ("fused_lamb", "FusedLAMB")),
        *(("fused_novograd", "FusedNovoGrad"), ("fused_adagrad", "FusedAdagrad")),
        ("fused_mixed_precision_lamb", "FusedMixedPrecisionLamb"),
    ],
)
def test_apex_optimizers_are_those_of_ampctx_in_their_modules_too(module, name):
    cls = getattr(optimizers, name)
    assert getattr(apex_optimizers, name) is cls
    assert getattr(importlib.import_module(f"apex.optimizers.{module}"), name) is cls
    assert getattr(getattr(apex_optimizers, module), name) is cls


def test_the_old_places_of_fp16_optimizer():
    assert apex_optimizers.FP16_Optimizer is FP16_Optimizer
    assert importlib.import_module("apex.optimizers.fp16_optimizer").FP16_Optimizer is FP16_Optimizer
    assert importlib.import_module("apex.contrib.optimizers.fp16_optimizer").FP16_Optimizer is FP16_Optimizer


# --- the old arguments of step ----------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("scale", [1.0, 128.0], ids=str)
@pytest.mark.parametrize("nested", [False, True], ids=["flat", "by-group"])
def test_a_step_on_gradients_from_elsewhere(old, new, scale, nested):
    params, twins = params_of(), params_of()
    model = [p.detach().half() for p in params]
    optimizer = old(params)
    for step in range(3):
        grads = grads_of(step, factor=scale)
        kept = [g.clone() for g in grads]
        optimizer.step(grads=[grads] if nested else grads, output_params=[model] if nested else model, scale=scale)
        assert all(p.grad is None for p in params)
        assert_same(grads, kept)
    assert_same(values(params), stepped(new(twins), twins))
    assert_same(model, [p.detach().half() for p in params])


@both
def test_a_step_without_old_arguments_takes_the_gradients_that_are_there(old, new):
    params, twins = params_of(), params_of()
    assert_same(stepped(old(params), params), stepped(new(twins), twins))


@both
def test_scale_divides_the_gradients_that_are_there_too(old, new):
    params, twins = params_of(), params_of()
    for p, g in zip(params, grads_of(0), strict=True):
        p.grad = g.float() * 8
    grads = [p.grad for p in params]
    before = values(grads)
    old(params).step(scale=8.0)
    assert all(p.grad is g for p, g in zip(params, grads, strict=True))
    assert_same(values(grads), before)
    assert_same(values(params), stepped(new(twins), twins, steps=1))


@both
def test_one_gradient_may_be_missing_or_already_there(old, new):
    params, twins = params_of(), params_of()
    untouched = values(params[1:])
    first, second = grads_of(0)
    old(params).step(grads=[first, None])
    assert_same(values(params[1:]), untouched)
    params[1].grad = second.float()
    old(params[1:]).step(grads=[None])
    for twin, grad in zip(twins, (first, second), strict=True):
        twin.grad = grad.float()
        new([twin]).step()
    assert_same(values(params), values(twins))


@both
def test_iterators_and_closures(old, new):
    params, twins = params_of(), params_of()
    seen = []

    def closure():
        assert torch.is_grad_enabled()
        seen.append(True)
        return 3.0

    outputs = [torch.zeros(shape, dtype=torch.bfloat16) for shape in SHAPES]
    assert old(params).step(closure, grads=iter(grads_of(0)), output_params=iter(outputs)) == 3.0
    assert seen == [True]
    assert_same(values(params), stepped(new(twins), twins, steps=1))
    assert_same(outputs, [p.detach().bfloat16() for p in params])


@both
def test_several_groups(old, new):
    params, twins = params_of(), params_of()
    grads = grads_of(0)
    old([{"params": [p]} for p in params]).step(grads=[[g] for g in grads])
    assert_same(values(params), stepped(new(twins), twins, steps=1))


@pytest.mark.parametrize("given", [True, False], ids=["norm-given", "norm-computed"])
@pytest.mark.parametrize("most", [0.5, 1e4], ids=["clipped", "within"])
def test_adam_scales_down_to_max_grad_norm_group_by_group(given, most):
    params, twins = params_of(), params_of()
    scale = 16.0
    grads = grads_of(0, factor=scale)
    optimizer = FusedAdam([{"params": [p]} for p in params], lr=0.1, eps=1.0, bias_correction=False, max_grad_norm=most)
    norms = [torch.linalg.vector_norm(g.float()).reshape(1) for g in grads]
    optimizer.step(grads=[[g] for g in grads], scale=scale, grad_norms=norms if given else None)
    reference = optimizers.FusedAdam(twins, lr=0.1, eps=1.0, bias_correction=False)
    for p, g in zip(twins, grads, strict=True):
        norm = torch.linalg.vector_norm(g.float()) / scale
        p.grad = g.float() / scale / max(1.0, (norm.item() + 1e-6) / most)
    reference.step()
    torch.testing.assert_close(values(params), values(twins))
    assert [group["max_grad_norm"] for group in optimizer.param_groups] == [most, most]


@pytest.mark.parametrize("bias_correction", [True, False], ids=["corrected", "uncorrected"])
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_adam_corrects_eps_and_decay_as_of_old(bias_correction, lr):
    options = {"betas": (0.8, 0.95), "eps": 0.5, "weight_decay": 0.3}
    params = params_of()
    optimizer = FusedAdam(params, lr=lr, bias_correction=bias_correction, **options)
    exact = [p.detach().double() for p in params]
    m, v = [torch.zeros_like(p) for p in exact], [torch.zeros_like(p) for p in exact]
    for t in range(1, 6):
        size = 0.1 * math.sqrt(1 - 0.95**t) / (1 - 0.8**t) if bias_correction else 0.1
        for i, g in enumerate(grads_of(t)):
            params[i].grad = g.float()
            m[i] = 0.8 * m[i] + 0.2 * g.double()
            v[i] = 0.95 * v[i] + 0.05 * g.double() ** 2
            exact[i] = exact[i] - size * (m[i] / (v[i].sqrt() + 0.5) + 0.3 * exact[i])
        optimizer.step()
    torch.testing.assert_close([p.detach() for p in params], [p.float() for p in exact])
    assert optimizer.param_groups[0]["lr"] is lr
    assert optimizer.state[params[0]]["step"] == 5


def test_max_grad_norm_of_a_group_counts():
    params = params_of()
    optimizer = FusedAdam([{"params": params[:1], "max_grad_norm": 0.5}, {"params": params[1:]}])
    assert [group["max_grad_norm"] for group in optimizer.param_groups] == [0.5, 0.0]


def test_adam_takes_its_old_arguments_in_order():
    optimizer = FusedAdam(params_of(), 0.1, False, (0.8, 0.9), 1e-3, False, 0.2, 1.0, True, True)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["bias_correction"], group["betas"], group["eps"]) == (0.1, False, (0.8, 0.9), 1e-3)
    assert (group["weight_decay"], group["max_grad_norm"], group["amsgrad"]) == (0.2, 1.0, True)
    assert isinstance(optimizer, optimizers.FusedAdam)


def test_sgd_resets_what_a_scale_left_for_one_step():
    params, twins = params_of(), params_of()
    optimizer = FusedSGD(params, lr=0.1)
    optimizer.most_recent_scale, optimizer.scale_set_by_backward = 4.0, True
    optimizer.step(grads=grads_of(0, factor=4.0))
    assert (optimizer.most_recent_scale, optimizer.scale_set_by_backward) == (1.0, False)
    assert_same(values(params), stepped(optimizers.FusedSGD(twins, lr=0.1), twins, steps=1))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"grads": 3}, ampctx.AmpTypeError, "grads must be a list of tensors, or of lists of tensors, got int"),
        ({"grads": [1, 2]}, ampctx.AmpTypeError, "grads must hold tensors or None, got int"),
        ({"grads": grads_of(0)[:1]}, ampctx.AmpValueError, r"grads has \[1\] tensors by group, .* has \[2\]"),
        ({"output_params": [[]]}, ampctx.AmpValueError, r"output_params has \[0\] tensors by group"),
        ({"scale": 0.0}, ampctx.AmpValueError, "scale is 0.0"),
        ({"grad_norms": []}, ampctx.AmpValueError, "grad_norms has 0 norms, the optimizer has 1 groups"),
    ],
    ids=["no-list", "no-tensors", "too-few", "no-outputs", "scale", "norms"],
)
@both
def test_bad_arguments_of_step_are_refused_by_name(old, new, arguments, error, message):
    params = params_of()
    before = values(params)
    with pytest.raises(error, match=message):
        old(params).step(**arguments)
    assert_same(values(params), before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eps_inside_sqrt": True}, "eps_inside_sqrt=True.* is not supported by ampctx: leave it out"),
        (
            {"amp_scale_adjustment": 2.0},
            "amp_scale_adjustment=.* is not supported by ampctx: pass the product as scale",
        ),
        ({"max_grad_norm": -1.0}, "max_grad_norm"),
    ],
    ids=["eps", "adjustment", "norm"],
)
def test_what_adam_does_not_serve_is_refused_by_name(options, message):
    with pytest.raises(ampctx.AmpError, match=message):
        FusedAdam(params_of(), **options)


# --- FP16_Optimizer ---------------------------------------------------------------------------------------------------


def model_of():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).half()
    model[1].bias.data = model[1].bias.data.float()
    return model


def loss_of(model, seed=0, factor=1.0):
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed)).half()
    return ((model[0](x) @ model[1].weight.t() + model[1].bias.half()).float() * factor).pow(2).mean()


def train(model, optimizer, steps=3):
    for step in range(steps):
        optimizer.zero_grad()
        optimizer.backward(loss_of(model, step))
        optimizer.step()


@both
@pytest.mark.parametrize("arguments", [{}, {"static_loss_scale": 64.0}, {"dynamic_loss_scale": True}], ids=str)
def test_training_is_that_of_the_masters_by_hand(old, new, arguments):
    model, twin = model_of(), model_of()
    optimizer = FP16_Optimizer(old(model.parameters()), **arguments)
    scale = optimizer.loss_scale
    train(model, optimizer)
    masters = [p.detach().float().requires_grad_() for p in twin.parameters()]
    reference = new(masters)
    for step in range(3):
        twin.zero_grad()
        (loss_of(twin, step) * scale).backward()
        for p, m in zip(twin.parameters(), masters, strict=True):
            m.grad = p.grad.float() / scale
        reference.step()
        with torch.no_grad():
            for p, m in zip(twin.parameters(), masters, strict=True):
                p.copy_(m)
    assert_same(values(model.parameters()), values(twin.parameters()))
    assert_same(values(optimizer.fp32_groups[0]), values(masters))
    assert (optimizer.cur_iter, optimizer.overflow) == (3, False)


def test_groups_hold_every_parameter():
    model = model_of()
    optimizer = FP16_Optimizer(FusedAdam([{"params": model[0].parameters()}, {"params": model[1].parameters()}]))
    assert optimizer.fp16_groups == [list(model[0].parameters()), list(model[1].parameters())]
    assert [[m.dtype for m in group] for group in optimizer.fp32_groups] == [[torch.float32] * 2] * 2
    assert optimizer.fp32_groups[1] is optimizer.optimizer.param_groups[1]["params"]


def test_backward_leaves_scaled_gradients_which_step_consumes():
    model = model_of()
    optimizer = FP16_Optimizer(FusedSGD(model.parameters(), lr=0.1), static_loss_scale=4.0)
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


@pytest.mark.parametrize(
    ("arguments", "after"),
    [({"dynamic_loss_scale": True}, 2.0**15), ({"static_loss_scale": 8.0}, 8.0)],
    ids=["dynamic", "static"],
)
@pytest.mark.parametrize("bad", [math.inf, math.nan], ids=str)
def test_an_overflow_skips_the_step(arguments, after, bad, caplog):
    model = model_of()
    optimizer = FP16_Optimizer(FusedAdam(model.parameters()), **arguments)
    before = values(model.parameters())
    optimizer.backward(loss_of(model, factor=bad))
    assert optimizer.step() is None
    assert (optimizer.overflow, optimizer.cur_scale, optimizer.loss_scale, optimizer.cur_iter) == (
        True,
        after,
        after,
        1,
    )
    assert f"Gradient overflow.  Skipping step, reducing loss scale to {after}" in caplog.messages
    assert_same(values(model.parameters()), before)
    train(model, optimizer, steps=1)
    assert not torch.equal(model[0].weight, before[0])


def test_the_dynamic_scale_grows_after_its_window():
    model = model_of()
    arguments = {"init_scale": 4.0, "scale_window": 2}
    optimizer = FP16_Optimizer(
        FusedSGD(model.parameters(), lr=0.1), dynamic_loss_scale=True, dynamic_loss_args=arguments
    )
    scales = []
    for step in range(4):
        train(model, optimizer, steps=1)
        scales.append(optimizer.cur_scale)
        assert optimizer.cur_iter == step + 1
    assert scales == [4.0, 8.0, 8.0, 16.0]
    assert (optimizer.last_overflow_iter, optimizer.scale_factor, optimizer.scale_window) == (-1, 2.0, 2)
    default = FP16_Optimizer(FusedAdam(model_of().parameters()), dynamic_loss_scale=True)
    assert (default.cur_scale, default.scale_window) == (2.0**16, 1000)


def test_the_scale_is_assigned():
    optimizer = FP16_Optimizer(FusedAdam(model_of().parameters()), dynamic_loss_scale=True)
    optimizer.cur_scale = 16.0
    assert optimizer.loss_scale == optimizer.loss_scaler.cur_scale == 16.0
    optimizer.loss_scale = 32.0
    assert optimizer.cur_scale == 32.0
    with pytest.raises(ampctx.AmpValueError, match="loss_scale is -1.0"):
        optimizer.loss_scale = -1


@pytest.mark.parametrize(
    "arguments", [{"static_loss_scale": 8.0}, {"dynamic_loss_scale": True}], ids=["static", "dynamic"]
)
@pytest.mark.parametrize("flat", [False, True], ids=["list", "flat"])
def test_a_run_goes_on_from_a_checkpoint(arguments, flat):
    model = model_of()
    optimizer = FP16_Optimizer(FusedAdam(model.parameters()), **arguments)
    train(model, optimizer)
    state = optimizer.state_dict()
    scale_keys = {"last_overflow_iter", "scale_factor", "scale_window"} if "dynamic_loss_scale" in arguments else set()
    assert state.keys() == {
        *("dynamic_loss_scale", "cur_scale", "cur_iter", "optimizer_state_dict", "fp32_groups"),
        *scale_keys,
    }
    if flat:
        state["fp32_groups_flat"] = [torch.cat([m.flatten() for m in group]) for group in state.pop("fp32_groups")]
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": state}, file)
    file.seek(0)
    saved = torch.load(file)
    resumed = model_of()
    other = FP16_Optimizer(FusedAdam(resumed.parameters()), **arguments)
    resumed.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    assert (other.cur_scale, other.cur_iter) == (optimizer.cur_scale, 3)
    train(model, optimizer)
    train(resumed, other)
    assert_same(values(resumed.parameters()), values(model.parameters()))
    assert_same(values(other.fp32_groups[0]), values(optimizer.fp32_groups[0]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("cur_scale"), 'has no "cur_scale"'),
        (lambda s: s.pop("scale_window"), 'has no "scale_window"'),
        (lambda s: s.update(cur_scale=0.0), "a loss scale must be > 0"),
        (lambda s: s["fp32_groups"][0].pop(), r"\['fp32_groups'\]\[0\] has masters of shapes"),
        (lambda s: s.update(fp32_groups_flat=[torch.zeros(3)]), r"fp32_groups_flat'\]\[0\] is flat with 3 elements"),
    ],
    ids=["no-scale", "no-window", "zero", "masters", "flat"],
)
def test_a_bad_checkpoint_changes_nothing(change, message):
    model = model_of()
    optimizer = FP16_Optimizer(FusedAdam(model.parameters()), dynamic_loss_scale=True)
    state = {**optimizer.state_dict(), "cur_scale": 2.0}
    change(state)
    with pytest.raises(ampctx.AmpError, match=message):
        optimizer.load_state_dict(state)
    assert optimizer.cur_scale == 2.0**16


def test_a_closure_is_refused():
    with pytest.raises(NotImplementedError, match="takes no closure: use apex.fp16_utils.FP16_Optimizer"):
        FP16_Optimizer(FusedAdam(model_of().parameters())).step(lambda: None)


@pytest.mark.parametrize("name", ["update_master_grads", "clip_master_grads"])
def test_what_apexs_class_has_not_is_not_there(name):
    optimizer = FP16_Optimizer(FusedAdam(model_of().parameters()))
    assert not hasattr(optimizer, name)
    with pytest.raises(AttributeError, match=f"has no {name}, as it unscales in step.*: give FusedAdam max_grad_norm"):
        getattr(optimizer, name)


def test_amp_initialize_says_why_it_does_not_take_one():
    model = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="instance of apex.contrib.optimizers.FP16_Optimizer"):
        amp.initialize(model, FP16_Optimizer(FusedAdam(model.parameters())), verbosity=0)
