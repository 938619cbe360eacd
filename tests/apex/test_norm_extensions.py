"""fused_layer_norm_cuda, fused_mix_prec_layer_norm_cuda and fast_layer_norm against autograd in fp64."""

import fast_layer_norm
import fused_layer_norm_cuda as norms
import fused_mix_prec_layer_norm_cuda as mixed
import pytest
import torch

from ampctx import AmpTypeError, AmpValueError

F16, B16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
SHAPE, EPS = (3, 4), 0.125
ROWS = [(5,), (2, 3), (), (0,)]


def tensors(kind, rows, dtype, parameter_dtype):
    """Input, parameters and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    count = {"plain": 0, "layer": 2, "rms": 1}[kind]
    x = torch.randn((*rows, *SHAPE), generator=generator) + 1.0
    parameters = [torch.randn(SHAPE, generator=generator) + 1.5 for _ in range(count)]
    dout = torch.randn(x.shape, generator=generator)
    return x.to(dtype), [p.to(parameter_dtype) for p in parameters], dout.to(dtype)


def by_formula(centers, x, weight=None, bias=None):
    dims = (-2, -1)
    x = x - x.mean(dims, keepdim=True) if centers else x
    x = x * (x.square().mean(dims, keepdim=True) + EPS).rsqrt()
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def exact(centers, x, parameters, dout):
    """Output, mean and inverse deviation, and the gradients of input and parameters, in fp64."""
    leaves = [t.double().requires_grad_() for t in (x, *parameters)]
    out = by_formula(centers, *leaves)
    grads = torch.autograd.grad(out, leaves, dout.double())
    rows = leaves[0].detach().reshape(-1, 12) if x.numel() else leaves[0].detach().reshape(0, 12)
    mean = rows.mean(1)
    spread = rows - mean[:, None] if centers else rows
    return out.detach(), mean, (spread.square().mean(1) + EPS).rsqrt(), grads


def assert_near(got, wanted, *narrow):
    bound = 4.0 * max(torch.finfo(dtype).eps for dtype in (got.dtype, *narrow))
    torch.testing.assert_close(got.double(), wanted, rtol=bound, atol=bound)


each_form = pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
each_norm = pytest.mark.parametrize("centers", [True, False], ids=["layer", "rms"])


def functions(centers, affine):
    """Forward and backward, and the kind of ``tensors`` that they take."""
    names = (f"{'' if centers else 'rms_'}{way}{'_affine' * affine}" for way in ("forward", "backward"))
    return *(getattr(norms, name) for name in names), ("layer" if centers else "rms") if affine else "plain"


@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize("dtype", [F64, F32, F16, B16], ids=str)
@each_form
@each_norm
def test_norms(centers, affine, dtype, rows):
    forward, backward, kind = functions(centers, affine)
    x, parameters, dout = tensors(kind, rows, dtype, dtype)
    out, *statistics = forward(x, SHAPE, *parameters, EPS)
    value, mean, invvar, gradients = exact(centers, x, parameters, dout)
    assert out.dtype == dtype
    assert {t.dtype for t in statistics} == {F64 if dtype == F64 else F32}
    for got, wanted in zip((out, *statistics), (value, *[mean] * centers, invvar), strict=True):
        assert_near(got, wanted)
    grads = backward(dout, *statistics, x, SHAPE, *parameters, EPS)
    for got, wanted in zip(grads if affine else [grads], gradients, strict=True):
        assert got.dtype == dtype
        assert_near(got, wanted)


@pytest.mark.parametrize("dtype", [F64, F32], ids=str)
@each_form
@each_norm
def test_gradients_from_the_output(centers, affine, dtype):
    """``memory_efficient``."""
    forward, backward, kind = functions(centers, affine)
    x, parameters, dout = tensors(kind, (5,), dtype, dtype)
    out, *_, invvar = forward(x, SHAPE, *parameters, EPS)
    small = torch.finfo(dtype).eps
    grads = backward(dout, *[None] * centers, invvar, out, SHAPE, *parameters, small if affine else EPS, True)
    for got, wanted in zip(grads if affine else [grads], exact(centers, x, parameters, dout)[3], strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e3 * small, atol=1e3 * small)


@pytest.mark.parametrize("value", [0.0, -1e-9])
def test_a_weight_of_nearly_0_gives_finite_gradients_from_the_output(value):
    x, (weight, bias), dout = tensors("layer", (5,), F32, F32)
    weight[1, 2] = value
    out, _, invvar = norms.forward_affine(x, SHAPE, weight, bias, EPS)
    for grad in norms.backward_affine(dout, None, invvar, out, SHAPE, weight, bias, EPS, True):
        assert grad.isfinite().all()
    rows = (5, 12)
    z, _, rsigma = fast_layer_norm.ln_fwd(x.view(rows), weight.view(-1), bias.view(-1), EPS)
    for grad in fast_layer_norm.ln_bwd(
        dout.view(rows), z, None, rsigma, weight.view(-1), bias.view(-1), memory_efficient=True
    )[:3]:
        assert grad.isfinite().all()


@pytest.mark.parametrize(("dtype", "parameter_dtype"), [(F16, F32), (B16, F32), (F32, B16), (F16, B16)], ids=str)
@pytest.mark.parametrize("module", [norms.forward_affine_mixed_dtypes, mixed.forward_affine], ids=["apex", "Megatron"])
def test_other_parameters_than_input(module, dtype, parameter_dtype):
    x, (weight, bias), dout = tensors("layer", (5,), dtype, parameter_dtype)
    out, mean, invvar = module(x, SHAPE, weight, bias, EPS)
    dout = dout.to(parameter_dtype)
    wanted = exact(True, x, (weight, bias), dout)
    assert out.dtype == parameter_dtype
    assert_near(out, wanted[0])
    grads = mixed.backward_affine(dout, mean, invvar, x, SHAPE, weight, bias, EPS)
    assert [g.dtype for g in grads] == [dtype, parameter_dtype, parameter_dtype]
    for got, value in zip(grads, wanted[3], strict=True):
        assert_near(got, value)
    # The plain form, where apex misreads the parameters.
    out = norms.forward_affine(x, SHAPE, weight, bias, EPS)[0]
    assert out.dtype == dtype
    assert_near(out, wanted[0])

    x, (weight,), dout = tensors("rms", (5,), dtype, parameter_dtype)
    out, _ = norms.rms_forward_affine_mixed_dtypes(x, SHAPE, weight, EPS)
    assert out.dtype == parameter_dtype
    assert_near(out, exact(False, x, (weight,), dout)[0])


@pytest.mark.parametrize(("dtype", "parameter_dtype"), [(F32, F32), (F16, F32), (B16, B16)], ids=str)
def test_fast_layer_norm(dtype, parameter_dtype):
    x, (gamma, beta), dout = tensors("layer", (5,), dtype, parameter_dtype)
    x, gamma, beta, dout = x.view(5, 12), gamma.view(-1), beta.view(-1), dout.view(5, 12).to(parameter_dtype)
    z, mu, rsigma = fast_layer_norm.ln_fwd(x, gamma, beta, EPS)
    assert (z.dtype, mu.dtype, rsigma.dtype) == (parameter_dtype, F32, F32)
    wanted = exact(True, x.view(5, *SHAPE), (gamma.view(SHAPE), beta.view(SHAPE)), dout.view(5, *SHAPE))
    assert_near(z, wanted[0].view(5, 12))
    for arguments in ((), (None, False), (beta, False)):
        dx, dgamma, dbeta, *workspaces = fast_layer_norm.ln_bwd(dout, x, mu, rsigma, gamma, *arguments)
        assert workspaces == [None, None]
        for got, value in zip((dx, dgamma, dbeta), wanted[3], strict=True):
            assert_near(got, value.reshape(got.shape))


def test_any_strides():
    x, (weight, bias), dout = tensors("layer", (5,), F32, F32)
    wanted = norms.forward_affine(x, SHAPE, weight, bias, EPS)
    strided = [t.transpose(-1, -2).contiguous().transpose(-1, -2) for t in (x, weight, bias, dout)]
    got = norms.forward_affine(strided[0], SHAPE, *strided[1:3], EPS)
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a, b)
    grads = norms.backward_affine(dout, *wanted[1:], x, SHAPE, weight, bias, EPS)
    again = norms.backward_affine(strided[3], *got[1:], strided[0], SHAPE, *strided[1:3], EPS)
    for a, b in zip(again, grads, strict=True):
        assert torch.equal(a, b)


def test_no_gradient_flows_and_autocast_has_no_part_in_it():
    x, (weight, bias), _ = tensors("layer", (5,), F32, F32)
    wanted = norms.forward_affine(x, SHAPE, weight, bias, EPS)
    with torch.autocast("cpu", B16):
        got = norms.forward_affine(x.requires_grad_(), SHAPE, weight, bias, EPS)
    assert not any(t.requires_grad for t in got)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_a_whole_number_as_shape():
    x = torch.randn(3, 4)
    assert torch.equal(norms.forward(x, 4, EPS)[0], norms.forward(x, (4,), EPS)[0])


@each_norm
def test_gradcheck(centers):
    """The functions without no_grad: a gradient flows through them."""
    x = torch.randn(3, 4, dtype=F64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weight, bias = torch.rand(2, 4, dtype=F64, generator=torch.Generator().manual_seed(1)).unbind()
    parameters = [weight.requires_grad_(), bias.requires_grad_()] if centers else [weight.requires_grad_()]
    names = [("" if centers else "rms_") + name for name in ("forward", "forward_affine", "backward_affine")]
    statistics, forward, backward = (getattr(norms, name).__wrapped__ for name in names)

    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, *parameters):
            ctx.save_for_backward(x, *parameters)
            return forward(x, (4,), *parameters, EPS)[0]

        @staticmethod
        def backward(ctx, dout):
            x, *parameters = ctx.saved_tensors
            return backward(dout, *statistics(x, (4,), EPS)[1:], x, (4,), *parameters, EPS)

    assert torch.autograd.gradcheck(Norm.apply, (x, *parameters))
    assert torch.autograd.gradgradcheck(Norm.apply, (x, *parameters))


X, (WEIGHT, BIAS), DOUT = tensors("layer", (5,), F32, F32)
_, MEAN, INVVAR = norms.forward_affine(X, SHAPE, WEIGHT, BIAS, EPS)
WRONG = {
    "no tensor": ("forward", (None, SHAPE, EPS), AmpTypeError, "input must be a tensor, got NoneType"),
    "integers": ("forward", (X.int(), SHAPE, EPS), AmpTypeError, "input has dtype torch.int32, expected float32 or"),
    "shape": ("forward", (X, (4, 3), EPS), AmpValueError, r"input has shape \(5, 3, 4\), expected \[\*, 4, 3\]"),
    "empty shape": ("rms_forward", (X, (), EPS), AmpValueError, "normalized_shape is empty, expected one dimension"),
    "too few dimensions": ("forward", (X[0, 0], SHAPE, EPS), AmpValueError, r"input has shape \(4,\), expected"),
    "weight": (
        "forward_affine",
        (X, SHAPE, WEIGHT[0], BIAS, EPS),
        AmpValueError,
        r"weight has shape \(4,\), expected \(3, 4\)",
    ),
    "no weight": ("forward_affine", (X, SHAPE, None, BIAS, EPS), AmpTypeError, "weight must be a tensor, got NoneType"),
    "bias": (
        "forward_affine_mixed_dtypes",
        (X, SHAPE, WEIGHT, BIAS.to("meta"), EPS),
        AmpValueError,
        "bias is on meta, and input is on cpu",
    ),
    "complex weight": (
        "rms_forward_affine",
        (X, SHAPE, WEIGHT.to(torch.complex64), EPS),
        AmpTypeError,
        "weight has dtype torch.complex64",
    ),
    "dout": (
        "backward",
        (DOUT[0], MEAN, INVVAR, X, SHAPE, EPS),
        AmpValueError,
        r"dout has shape \(3, 4\), expected \(5, 3, 4\)",
    ),
    "no mean": ("backward", (DOUT, None, INVVAR, X, SHAPE, EPS), AmpTypeError, "mean must be a tensor, got NoneType"),
    "mean": (
        "backward_affine",
        (DOUT, MEAN[1:], INVVAR, X, SHAPE, WEIGHT, BIAS, EPS),
        AmpValueError,
        r"mean has shape \(4,\), expected \(5,\)",
    ),
    "invvar": (
        "rms_backward_affine",
        (DOUT, INVVAR.view(5, 1), X, SHAPE, WEIGHT, EPS),
        AmpValueError,
        r"invvar has shape \(5, 1\), expected \(5,\)",
    ),
    "input": (
        "rms_backward",
        (DOUT, INVVAR, [X], SHAPE, EPS),
        AmpTypeError,
        "input_or_output must be a tensor, got list",
    ),
}


@pytest.mark.parametrize(("name", "arguments", "error", "message"), WRONG.values(), ids=WRONG)
def test_errors_name_the_argument(name, arguments, error, message):
    with pytest.raises(error, match=f"^{name}: {message}"):
        getattr(norms, name)(*arguments)
