"""fused_adam_cuda against its formula in fp64, and a program's optimizer over it."""

import fused_adam_cuda
import pytest
import torch
from apex.contrib.optimizers import FusedAdam
from apex.multi_tensor_apply import multi_tensor_applier
from torch import nn

from ampctx import AmpNotImplementedError, AmpTypeError, AmpValueError

F16, B16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
OPTIONS = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-3, "grad_scale": 128.0, "step": 3, "mode": 1}


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
    wanted, before = exact(p, m, v, g, **OPTIONS, **more), g.clone()
    copy = torch.full_like(p, torch.nan, dtype=grad_dtype)
    assert fused_adam_cuda.adam(p, copy, m, v, g, **OPTIONS, **more) is None
    for got, value in zip((p, m, v), wanted, strict=True):
        assert_near(got, value)
    assert torch.equal(copy, p.to(grad_dtype))
    assert torch.equal(g, before)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 0), (4, 5, 6)], ids=str)
def test_shapes_and_no_copy(shape):
    p, m, v, g = case(F32, F16, shape)
    wanted = exact(p, m, v, g, **OPTIONS)
    fused_adam_cuda.adam(p, torch.tensor([]), m, v, g, **OPTIONS)
    for got, value in zip((p, m, v), wanted, strict=True):
        assert_near(got, value)


def test_strides_and_leaves():
    p, m, v, g = case(F32, F32)
    wanted = exact(p, m, v, g, **OPTIONS)
    parameter = nn.Parameter(p.t().contiguous().t())
    moments = [torch.stack([t, t], dim=-1)[..., 0] for t in (m, v)]
    fused_adam_cuda.adam(parameter, torch.tensor([]), *moments, g, **OPTIONS)
    for got, value in zip((parameter.detach(), *moments), wanted, strict=True):
        assert_near(got, value)
    assert parameter.grad_fn is None


@pytest.mark.parametrize("copies", [False, True])
def test_several_at_once(copies):
    cases = [case(F32, F16, shape, seed) for seed, shape in enumerate([(3,), (0,), (2, 5)])]
    wanted = [exact(*tensors, **OPTIONS, decay=0.1) for tensors in cases]
    lists = [list(tensors) for tensors in zip(*cases, strict=True)]
    outputs = [torch.full_like(g, torch.nan) for g in lists[3]]
    flag = torch.ones(1, dtype=torch.int32)  # has no part in it
    multi_tensor_applier(
        fused_adam_cuda.adam_mt, flag, [*lists, outputs] if copies else lists, *OPTIONS.values(), 1, 0.1
    )
    for tensors, values in zip(cases, wanted, strict=True):
        for got, value in zip(tensors, values, strict=False):
            assert_near(got, value)
    if copies:
        assert all(torch.equal(out, p.half()) for out, p in zip(outputs, lists[0], strict=True))
    assert flag.item() == 1


@pytest.mark.parametrize("bias_correction", [1, 0], ids=["corrected", "uncorrected"])
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_a_programs_optimizer_is_apexs(lr, bias_correction):
    """The loop of FusedAdam, as many programs have copied it, against ampctx's class."""
    theirs, _, _, _ = case(F32, F32)
    reference = nn.Parameter(theirs.clone())
    options = {"bias_correction": bool(bias_correction), "betas": (0.8, 0.95), "eps": 0.5, "weight_decay": 0.3}
    optimizer = FusedAdam([reference], lr=lr, **options)
    m, v, copy = torch.zeros_like(theirs), torch.zeros_like(theirs), torch.empty_like(theirs, dtype=F16)
    for step in range(1, 6):
        grad = case(F32, F16, seed=step)[3]
        fused_adam_cuda.adam(theirs, copy, m, v, grad, 0.1, 0.8, 0.95, 0.5, 128.0, step, 1, bias_correction, 0.3)
        optimizer.step(grads=[grad], scale=128.0)
    torch.testing.assert_close(theirs, reference.detach())
    assert torch.equal(copy, theirs.half())
    assert optimizer.param_groups[0]["lr"] is lr
    assert optimizer.state[reference]["step"] == 5


P, M, V, G = case(F32, F32)
ARGUMENTS = {"p": P, "p_copy": torch.empty_like(P), "m": M, "v": V, "g": G, **OPTIONS}


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"p": None}, AmpTypeError, "p must be a tensor, got NoneType"),
        ({"p_copy": None}, AmpTypeError, r"p_copy\[0\] must be a tensor, got NoneType"),
        ({"p_copy": torch.ones(3)}, AmpValueError, r"p_copy\[0\] has 3 elements, p\[0\] has 15"),
        ({"m": torch.ones(2)}, AmpValueError, r"m\[0\] has 2 elements, p\[0\] has 15"),
        ({"v": V.int()}, AmpTypeError, r"v\[0\] has dtype torch.int32, expected float32"),
        ({"g": G.to_sparse()}, AmpTypeError, r"g\[0\] is not a strided tensor"),
        ({"g": G.to("meta")}, AmpValueError, r"g\[0\] is on meta, and "),
        ({"lr": "fast"}, AmpTypeError, "lr must be a number or a tensor, got str"),
        ({"beta1": torch.ones(2)}, AmpValueError, "beta1 has 2 elements, expected 1"),
        ({"mode": 2}, AmpValueError, "mode is 2, expected 0 or 1"),
        ({"mode": 0}, AmpNotImplementedError, r"mode 0 \(eps_inside_sqrt=True\) is not supported by ampctx: pass mode"),
        ({"grad_scale": 0.0}, AmpValueError, "grad_scale is 0, expected a number > 0"),
        ({"step": 0}, AmpValueError, "step is 0.0, expected the number of this step, from 1"),
    ],
)
def test_errors_name_the_argument_and_change_nothing(wrong, error, message):
    before = [t.clone() for t in (P, M, V)]
    with pytest.raises(error, match=f"^adam: {message}"):
        fused_adam_cuda.adam(**{**ARGUMENTS, **wrong})
    assert all(torch.equal(a, b) for a, b in zip((P, M, V), before, strict=True))
