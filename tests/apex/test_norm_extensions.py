"""fused_layer_norm_cuda, fused_mix_prec_layer_norm_cuda and fast_layer_norm against autograd in fp64."""

import fast_layer_norm
import fused_layer_norm_cuda as norms
import fused_mix_prec_layer_norm_cuda as mixed
import pytest
import torch
from kernel_cases import norm_formula, norm_tensors

from ampctx import AmpTypeError, AmpValueError

F16, B16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
SHAPE, EPS = (3, 4), 0.125
ROWS = [(5,), (2, 3), (), (0,)]


def exact(centers, x, parameters, dout):
    """Output, mean and inverse deviation, and the gradients of input and parameters, in fp64."""
    leaves = [t.double().requires_grad_() for t in (x, *parameters)]
    out = norm_formula(centers, EPS, *leaves)
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
    """Forward and backward, and how many parameters they take."""
    names = (f"{'' if centers else 'rms_'}{way}{'_affine' * affine}" for way in ("forward", "backward"))
    return *(getattr(norms, name) for name in names), affine * (2 if centers else 1)


@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize("dtype", [F64, F32, F16, B16], ids=str)
@each_form
@each_norm
def test_norms(centers, affine, dtype, rows):
    forward, backward, count = functions(centers, affine)
    x, parameters, dout = norm_tensors(count, dtype, dtype, rows)
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
    forward, backward, count = functions(centers, affine)
    x, parameters, dout = norm_tensors(count, dtype, dtype)
    out, *_, invvar = forward(x, SHAPE, *parameters, EPS)
    small = torch.finfo(dtype).eps
    grads = backward(dout, *[None] * centers, invvar, out, SHAPE, *parameters, small if affine else EPS, True)
    for got, wanted in zip(grads if affine else [grads], exact(centers, x, parameters, dout)[3], strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e3 * small, atol=1e3 * small)


@pytest.mark.parametrize(("dtype", "parameter_dtype"), [(F16, F32), (B16, F32), (F32, B16), (F16, B16)], ids=str)
@pytest.mark.parametrize("module", [norms.forward_affine_mixed_dtypes, mixed.forward_affine], ids=["apex", "Megatron"])
def test_other_parameters_than_input(module, dtype, parameter_dtype):
    x, (weight, bias), dout = norm_tensors(2, dtype, parameter_dtype)
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

    x, (weight,), dout = norm_tensors(1, dtype, parameter_dtype)
    out, _ = norms.rms_forward_affine_mixed_dtypes(x, SHAPE, weight, EPS)
    assert out.dtype == parameter_dtype
    assert_near(out, exact(False, x, (weight,), dout)[0])


@pytest.mark.parametrize(("dtype", "parameter_dtype"), [(F32, F32), (F16, F32), (B16, B16)], ids=str)
def test_fast_layer_norm(dtype, parameter_dtype):
    x, (gamma, beta), dout = norm_tensors(2, dtype, parameter_dtype)
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


X, (WEIGHT, BIAS), DOUT = norm_tensors(2, F32, F32)
_, MEAN, INVVAR = norms.forward_affine(X, SHAPE, WEIGHT, BIAS, EPS)
WRONG = {
    "no tensor": ("forward", (None, SHAPE, EPS), AmpTypeError, "input must be a tensor, got NoneType"),
    "shape": ("forward", (X, (4, 3), EPS), AmpValueError, r"input has shape \(5, 3, 4\), expected \[\*, 4, 3\]"),
    "weight": ("forward_affine", (X, SHAPE, WEIGHT[0], BIAS, EPS), AmpValueError,
        r"weight has shape \(4,\), expected \(3, 4\)"),
    "bias": ("forward_affine_mixed_dtypes", (X, SHAPE, WEIGHT, BIAS.to("meta"), EPS), AmpValueError,
        "bias is on meta, and input is on cpu"),
    "dout": ("backward", (DOUT[0], MEAN, INVVAR, X, SHAPE, EPS), AmpValueError,
        r"dout has shape \(3, 4\), expected \(5, 3, 4\)"),
    "mean": ("backward_affine", (DOUT, MEAN[1:], INVVAR, X, SHAPE, WEIGHT, BIAS, EPS), AmpValueError,
        r"mean has shape \(4,\), expected \(5,\)"),
    "input": ("rms_backward", (DOUT, INVVAR, [X], SHAPE, EPS), AmpTypeError,
        "input_or_output must be a tensor, got list"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "arguments", "error", "message"), WRONG.values(), ids=WRONG)
def test_errors_name_the_argument(name, arguments, error, message):
    with pytest.raises(error, match=f"^{name}: {message}"):
        getattr(norms, name)(*arguments)
