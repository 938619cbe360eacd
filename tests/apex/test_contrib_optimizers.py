"""apex.contrib.optimizers, and the names in apex.optimizers besides the classes of ampctx.optimizers."""

import pytest
import torch
from apex.contrib.optimizers import FusedAdam, FusedSGD
from kit import assert_same
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
