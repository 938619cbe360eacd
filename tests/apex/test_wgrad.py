"""fused_weight_gradient_mlp_cuda against plain torch in fp64, and a linear layer that accumulates with it."""

import importlib

import fused_weight_gradient_mlp_cuda as wgrad
import pytest
import torch

from ampctx import AmpTypeError, AmpValueError

F16, B16, F32 = torch.float16, torch.bfloat16, torch.float32
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
TOKENS = [(6,), (1,), (0,), (3, 5), (2, 0), (2, 3, 4)]
OUT, IN = 5, 7


def case(tokens, dtype, grad_dtype, device="cpu"):
    """Input, gradient of the output, and a main_grad that is not 0."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((*tokens, IN), (*tokens, OUT), (OUT, IN))
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    return [v.to(device, d) for v, d in zip(values, (dtype, dtype, grad_dtype), strict=True)]


def exact(x, dy, main_grad):
    rows, grads = x.double().reshape(-1, IN), dy.double().reshape(-1, OUT)
    return main_grad.double() + sum((torch.outer(g, r) for g, r in zip(grads, rows, strict=True)), torch.zeros(()))


def assert_near(got, wanted):
    bound = 16.0 * torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.double(), wanted.double(), rtol=bound, atol=bound)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "grad_dtype"), [(F32, F32), (F16, F32), (B16, F32), (F16, F16), (B16, B16)], ids=str)
@pytest.mark.parametrize("tokens", TOKENS, ids=str)
def test_accumulation(tokens, dtype, grad_dtype, device):
    x, dy, main_grad = case(tokens, dtype, grad_dtype, device)
    wanted = exact(x, dy, main_grad)
    add = wgrad.wgrad_gemm_accum_fp32 if grad_dtype == F32 else wgrad.wgrad_gemm_accum_fp16
    assert add(x, dy, main_grad) is None
    assert_near(main_grad, wanted)
    wanted = exact(x, dy, main_grad)
    add(x, dy, main_grad)
    assert_near(main_grad, wanted)


@pytest.mark.parametrize("device", DEVICES)
def test_sums_of_16_bit_products_are_fp32(device):
    """In 16 bits the sum would stop at 256, and an addition of 2**-10 to 1 would be lost."""
    x = torch.ones(1024, 1, dtype=B16, device=device)
    main_grad = torch.zeros(1, 1, device=device)
    wgrad.wgrad_gemm_accum_fp32(x, x, main_grad)
    assert main_grad.item() == 1024.0
    main_grad = torch.ones(1, 1, device=device)
    wgrad.wgrad_gemm_accum_fp32(x[:1], torch.full_like(x[:1], 2.0**-10), main_grad)
    assert main_grad.item() == 1.0 + 2.0**-10
    main_grad = torch.full((1, 1), 2048.0, dtype=F16, device=device)
    ones = torch.ones(2, 1, dtype=F16, device=device)
    wgrad.wgrad_gemm_accum_fp16(ones, ones, main_grad)  # 2048 + 1 is 2048 in fp16
    assert main_grad.item() == 2050.0


X, DY, MAIN = case((6,), F32, F32)
HALVES = [t.half() for t in (X, DY, MAIN)]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((X, 1.0, MAIN), AmpTypeError, "d_output must be a tensor, got float"),
        ((X.to_sparse(), DY, MAIN), AmpTypeError, "input is not a strided tensor: pass input.to_dense"),
        ((X.long(), DY, MAIN), AmpTypeError, "input has dtype torch.int64, expected float32 or float16 or bfloat16"),
        ((X, DY.half(), MAIN), AmpTypeError, "d_output has dtype torch.float16, expected float32"),
        ((X, DY, MAIN.half()), AmpTypeError, "main_grad has dtype torch.float16, expected float32"),
        ((X[0], DY, MAIN), AmpValueError, r"input has shape \(7,\), expected 2 dimensions or more"),
        ((X, DY[:4], MAIN), AmpValueError, "input has 6 tokens, d_output has 4"),
        ((X, DY, MAIN.t()), AmpValueError, r"main_grad has shape \(7, 5\), expected \(5, 7\)"),
        ((X, DY.to("meta"), MAIN), AmpValueError, "d_output is on meta, and input is on cpu"),
    ],
)
def test_errors_name_the_argument_and_change_nothing(arguments, error, message):
    before = MAIN.clone()
    with pytest.raises(error, match=f"^wgrad_gemm_accum_fp32: {message}"):
        wgrad.wgrad_gemm_accum_fp32(*arguments)
    assert torch.equal(MAIN, before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((X, DY, MAIN), "input has dtype torch.float32, expected float16 or bfloat16"),
        ((*HALVES[:2], MAIN), "main_grad has dtype torch.float32, expected float16"),
        ((*HALVES[:2], MAIN.bfloat16()), "main_grad has dtype torch.bfloat16, expected float16"),
    ],
)
def test_fp16_takes_one_type_of_16_bits(arguments, message):
    with pytest.raises(AmpTypeError, match=f"^wgrad_gemm_accum_fp16: {message}"):
        wgrad.wgrad_gemm_accum_fp16(*arguments)


@pytest.mark.parametrize(
    "name",
    [
        "fast_layer_norm",
        "fused_adam_cuda",
        "fused_layer_norm_cuda",
        "fused_mix_prec_layer_norm_cuda",
        "fused_weight_gradient_mlp_cuda",
        "xentropy_cuda",
    ],
)
def test_names_that_an_extension_lacks(name):
    module = importlib.import_module(name)
    with pytest.raises(
        AttributeError, match=f"^module '{name}' has no attribute 'nothing': ampctx does not support it"
    ):
        module.nothing  # noqa: B018
    assert not hasattr(module, "__wrapped__")
