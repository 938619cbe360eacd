"""apex.contrib.optimizers, the names in apex.optimizers besides the classes of ampctx, and fused_adam_cuda."""

from functools import partial

import fused_adam_cuda
import pytest
import torch
from apex.contrib.optimizers import FusedAdam, FusedSGD
from apex.multi_tensor_apply import multi_tensor_applier
from kit import assert_same
from torch import nn

from ampctx import AmpError, AmpNotImplementedError, AmpTypeError, AmpValueError, optimizers

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
    # Where the old formula is that of today.
    "adam": (FusedAdam, optimizers.FusedAdam, {"lr": 0.1, "weight_decay": 0.1, "bias_correction": False}),
    "sgd": (FusedSGD, optimizers.FusedSGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
}
PAIRS = [(partial(old, **options), partial(new, **options)) for old, new, options in OLD.values()]
both = pytest.mark.parametrize(("old", "new"), PAIRS, ids=OLD)


# --- the old arguments of step ----------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("scale", [1.0, 128.0], ids=str)
@pytest.mark.parametrize("form", ["flat", "nested", "by-group"])
def test_a_step_on_gradients_from_elsewhere(old, new, scale, form):
    params, twins = params_of(), params_of()
    model = [p.detach().half() for p in params]
    optimizer = old([{"params": [p]} for p in params] if form == "by-group" else params)
    given = {"flat": lambda ts: ts, "nested": lambda ts: [ts], "by-group": lambda ts: [[t] for t in ts]}[form]
    for step in range(3):
        grads = grads_of(step, factor=scale)
        kept = [g.clone() for g in grads]
        optimizer.step(grads=given(grads), output_params=given(model), scale=scale)
        assert all(p.grad is None for p in params)
        assert_same(grads, kept)
    assert_same(values(params), stepped(new(twins), twins))
    assert_same(model, [p.detach().half() for p in params])


@both
def test_a_step_without_gradients_takes_those_that_are_there(old, new):
    params, twins = params_of(), params_of()
    assert_same(stepped(old(params), params), stepped(new(twins), twins))
    params, twins = params_of(), params_of()
    for p, g in zip(params, grads_of(0), strict=True):
        p.grad = g.float() * 8
    grads = [p.grad for p in params]
    before = values(grads)
    old(params).step(scale=8.0)
    assert all(p.grad is g for p, g in zip(params, grads, strict=True))
    assert_same(values(grads), before)
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


def test_adam_takes_its_old_arguments_in_order():
    first, second = params_of()
    groups = [{"params": [first]}, {"params": [second], "max_grad_norm": 0.5}]
    optimizer = FusedAdam(groups, 0.1, False, (0.8, 0.9), 1e-3, False, 0.2, 1.0, True, True)
    group = optimizer.param_groups[0]
    assert optimizer.param_groups[1]["max_grad_norm"] == 0.5
    assert (group["lr"], group["bias_correction"], group["betas"], group["eps"]) == (0.1, False, (0.8, 0.9), 1e-3)
    assert (group["weight_decay"], group["max_grad_norm"], group["amsgrad"]) == (0.2, 1.0, True)
    assert isinstance(optimizer, optimizers.FusedAdam)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"grads": 3}, AmpTypeError, "grads must be a list of tensors, or of lists of tensors, got int"),
        ({"grads": [1, 2]}, AmpTypeError, "grads must hold tensors or None, got int"),
        ({"grads": grads_of(0)[:1]}, AmpValueError, r"grads has \[1\] tensors by group, .* has \[2\]"),
        ({"output_params": [[]]}, AmpValueError, r"output_params has \[0\] tensors by group"),
        ({"scale": 0.0}, AmpValueError, "scale is 0.0"),
        ({"grad_norms": []}, AmpValueError, "grad_norms has 0 norms, the optimizer has 1 groups"),
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
        ({"amp_scale_adjustment": 2.0}, "amp_scale_adjustment=.* is not supported by ampctx: pass the product as"),
        ({"max_grad_norm": -1.0}, "max_grad_norm"),
    ],
    ids=["eps", "adjustment", "norm"],
)
def test_what_adam_does_not_serve_is_refused_by_name(options, message):
    with pytest.raises(AmpError, match=message):
        FusedAdam(params_of(), **options)


# --- fused_adam_cuda against its formula in fp64 ----------------------------------------------------------------------


F16, B16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
NUMBERS = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-3, "grad_scale": 128.0, "step": 3, "mode": 1}


def case(dtype, grad_dtype, shape=(5, 3), seed=0):
    """The parameter, its moments and its gradient."""
    generator = torch.Generator().manual_seed(seed)
    p, m, g = (torch.randn(shape, generator=generator) for _ in range(3))
    v = torch.rand(shape, generator=generator)
    return [p.to(dtype), m.to(dtype), v.to(dtype), (128.0 * g).to(grad_dtype)]


def exact(p, m, v, g, lr, beta1, beta2, eps, grad_scale, step, mode, bias_correction=1, decay=0.0):
    p, m, v, g = (t.double() for t in (p, m, v, g))
    g = g / grad_scale
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    rate = lr * (1 - beta2**step) ** 0.5 / (1 - beta1**step) if bias_correction else lr
    return p - rate * (m / (v.sqrt() + eps) + decay * p), m, v


def assert_near(got, wanted):
    bound = 4.0 * torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.double(), wanted, rtol=bound, atol=bound)


@pytest.mark.parametrize("more", [{}, {"bias_correction": 0}, {"decay": 0.1}, {"bias_correction": 1, "decay": 0.1}])
@pytest.mark.parametrize(("dtype", "grad_dtype"), [(F64, F64), (F32, F32), (F32, F16), (F32, B16)], ids=str)
def test_adam(dtype, grad_dtype, more):
    p, m, v, g = case(dtype, grad_dtype)
    wanted, before = exact(p, m, v, g, **NUMBERS, **more), g.clone()
    copy = torch.full_like(p, torch.nan, dtype=grad_dtype)
    assert fused_adam_cuda.adam(p, copy, m, v, g, **NUMBERS, **more) is None
    for got, value in zip((p, m, v), wanted, strict=True):
        assert_near(got, value)
    assert torch.equal(copy, p.to(grad_dtype))
    assert torch.equal(g, before)


@pytest.mark.parametrize("copies", [False, True])
def test_several_at_once(copies):
    cases = [case(F32, F16, shape, seed) for seed, shape in enumerate([(3,), (0,), (2, 5)])]
    wanted = [exact(*tensors, **NUMBERS, decay=0.1) for tensors in cases]
    lists = [list(tensors) for tensors in zip(*cases, strict=True)]
    outputs = [torch.full_like(g, torch.nan) for g in lists[3]]
    flag = torch.ones(1, dtype=torch.int32)  # has no part in it
    multi_tensor_applier(
        fused_adam_cuda.adam_mt, flag, [*lists, outputs] if copies else lists, *NUMBERS.values(), 1, 0.1
    )
    for tensors, values in zip(cases, wanted, strict=True):
        for got, value in zip(tensors, values, strict=False):
            assert_near(got, value)
    if copies:
        assert all(torch.equal(out, p.half()) for out, p in zip(outputs, lists[0], strict=True))
    assert flag.item() == 1


P, M, V, G = case(F32, F32)
ARGUMENTS = {"p": P, "p_copy": torch.empty_like(P), "m": M, "v": V, "g": G, **NUMBERS}


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"p": None}, AmpTypeError, "p must be a tensor, got NoneType"),
        ({"p_copy": torch.ones(3)}, AmpValueError, r"p_copy\[0\] has 3 elements, p\[0\] has 15"),
        ({"v": V.int()}, AmpTypeError, r"v\[0\] has dtype torch.int32, expected float32"),
        ({"g": G.to("meta")}, AmpValueError, r"g\[0\] is on meta, and "),
        ({"lr": "fast"}, AmpTypeError, "lr must be a number or a tensor, got str"),
        ({"mode": 2}, AmpValueError, "mode is 2, expected 0 or 1"),
        ({"mode": 0}, AmpNotImplementedError, r"mode 0 \(eps_inside_sqrt=True\) is not supported by ampctx: pass"),
        ({"grad_scale": 0.0}, AmpValueError, "grad_scale is 0, expected a number > 0"),
        ({"step": 0}, AmpValueError, "step is 0.0, expected the number of this step, from 1"),
    ],
)
def test_errors_name_the_argument_and_change_nothing(wrong, error, message):
    before = [t.clone() for t in (P, M, V)]
    with pytest.raises(error, match=f"^adam: {message}"):
        fused_adam_cuda.adam(**{**ARGUMENTS, **wrong})
    assert all(torch.equal(a, b) for a, b in zip((P, M, V), before, strict=True))
