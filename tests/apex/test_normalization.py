"""apex.normalization and apex.contrib.layer_norm against the formulas in fp64, and their rules for types."""

import copy
import inspect

import pytest
import torch
from apex.contrib.layer_norm import FastLayerNorm
from apex.contrib.layer_norm.layer_norm import FastLayerNormFN, _fast_layer_norm
from apex.normalization import FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm, fused_layer_norm
from kernel_cases import norm_formula, norm_tensors
from torch import nn

from ampctx import AmpValueError

F16, B16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
SHAPE = (3, 4)
EPS = 0.125

CLASSES = {
    "fused_layer_norm": "FusedLayerNormFunction",
    "fused_layer_norm_affine": "FusedLayerNormAffineFunction",
    "mixed_dtype_fused_layer_norm_affine": "FusedLayerNormAffineMixedDtypesFunction",
    "fused_rms_norm": "FusedRMSNormFunction",
    "fused_rms_norm_affine": "FusedRMSNormAffineFunction",
    "mixed_dtype_fused_rms_norm_affine": "FusedRMSNormAffineMixedDtypesFunction",
}


def tensors(function, input_dtype, parameter_dtype):
    """Input and parameters of a function, leaves that require a gradient."""
    count = ("affine" in function) * (2 if "layer" in function else 1)
    x, parameters, _ = norm_tensors(count, input_dtype, parameter_dtype)
    return [t.requires_grad_() for t in (x, *parameters)]


def check(function, call, input_dtype, parameter_dtype, output_dtype):
    ours = tensors(function, input_dtype, parameter_dtype)
    exact = [t.detach().double().requires_grad_() for t in ours]
    out = call(*ours)
    assert out.dtype == output_dtype
    expected = norm_formula("layer" in function, EPS, *exact)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    out.backward(upstream)
    expected.backward(upstream.double())
    for got, wanted in [(out, expected), *((a.grad, b.grad) for a, b in zip(ours, exact, strict=True))]:
        bound = 4.0 * max(torch.finfo(got.dtype).eps, torch.finfo(output_dtype).eps)
        torch.testing.assert_close(got.double(), wanted, rtol=bound, atol=bound)
    assert [t.grad.dtype for t in ours] == [t.dtype for t in ours]


@pytest.mark.parametrize("memory_efficient", [False, True])
@pytest.mark.parametrize("dtype", [F64, F32, F16, B16], ids=str)
@pytest.mark.parametrize(("function", "name"), CLASSES.items())
def test_functions_and_autograd_classes(function, name, dtype, memory_efficient):
    for call in (getattr(fused_layer_norm, function), getattr(fused_layer_norm, name).apply):
        check(function, lambda *t, call=call: call(*t, SHAPE, EPS, memory_efficient), dtype, dtype, dtype)


@pytest.mark.parametrize("function", [name for name in CLASSES if "affine" in name])
@pytest.mark.parametrize(
    ("input_dtype", "parameter_dtype"), [(F16, F32), (B16, F32), (F32, F16), (F16, B16), (F32, B16)], ids=str
)
def test_other_parameters_than_input(function, input_dtype, parameter_dtype):
    """apex's plain forms fail or misread here; its mixed ones have the type of the parameters."""
    output = parameter_dtype if "mixed" in function else input_dtype
    call = getattr(fused_layer_norm, function)
    check(function, lambda *t: call(*t, SHAPE, EPS), input_dtype, parameter_dtype, output)


@pytest.mark.parametrize("function", CLASSES)
def test_functions_have_apexs_defaults(function):
    parameters = inspect.signature(getattr(fused_layer_norm, function)).parameters
    assert parameters["eps"].default == 1e-6
    assert parameters["memory_efficient"].default is False
    assert list(parameters)[-3:] == ["normalized_shape", "eps", "memory_efficient"]


@pytest.mark.parametrize("autocast_dtype", [F16, B16], ids=str)
@pytest.mark.parametrize("function", CLASSES)
def test_autocast_casts_first(function, autocast_dtype):
    values = tensors(function, F32, F32)
    with torch.autocast("cpu", autocast_dtype):
        out = getattr(fused_layer_norm, function)(*values, SHAPE, EPS)
    assert out.dtype == autocast_dtype
    expected = getattr(fused_layer_norm, function)(*(v.to(autocast_dtype) for v in values), SHAPE, EPS)
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("input_dtype", "weight_dtype", "output_dtype"),
    [(F32, F32, F32), (F16, F32, F32), (F16, F16, F16), (F32, B16, B16), (F64, F32, F64), (F16, None, F32)],
    ids=str,
)
def test_manual_rms_norm(input_dtype, weight_dtype, output_dtype):
    x = torch.randn(5, *SHAPE, generator=torch.Generator().manual_seed(0)).to(input_dtype)
    weight = None if weight_dtype is None else torch.full(SHAPE, 1.5, dtype=weight_dtype)
    out = fused_layer_norm.manual_rms_norm(x, SHAPE, weight, EPS)
    assert out.dtype == output_dtype
    expected = norm_formula(False, EPS, x.double(), None if weight is None else weight.double())
    torch.testing.assert_close(out, expected.to(output_dtype))


# --- modules ----------------------------------------------------------------------------------------------------------

MODULES = {
    FusedLayerNorm: "fused_layer_norm_affine",
    MixedFusedLayerNorm: "mixed_dtype_fused_layer_norm_affine",
    FusedRMSNorm: "fused_rms_norm_affine",
    MixedFusedRMSNorm: "mixed_dtype_fused_rms_norm_affine",
}


@pytest.mark.parametrize("kind", MODULES)
def test_state(kind):
    module = kind(4, memory_efficient=True)
    names = ["weight", "bias"] if "Layer" in kind.__name__ else ["weight"]
    assert list(module.state_dict()) == names
    assert (module.eps, module.normalized_shape, module.memory_efficient) == (1e-5, (4,), True)
    nn.init.constant_(module.weight, 3.0)
    other = copy.deepcopy(module)
    module.reset_parameters()
    assert module.weight.tolist() == [1.0] * 4
    module.load_state_dict(other.state_dict())
    assert module.weight.tolist() == [3.0] * 4


@pytest.mark.parametrize(("kind", "base"), [(FusedLayerNorm, nn.LayerNorm), (FusedRMSNorm, nn.RMSNorm)])
def test_without_parameters(kind, base):
    module = kind([3, 4], EPS, False, True)
    assert isinstance(module, base)
    assert list(module.parameters()) == []
    x = torch.randn(2, 3, 4)
    assert torch.equal(module(x), base([3, 4], EPS, False)(x))


@pytest.mark.parametrize("kind", [MixedFusedLayerNorm, MixedFusedRMSNorm])
def test_mixed_forms_are_affine(kind):
    message = f"{kind.__name__} does not support `elementwise_affine"
    with pytest.warns(UserWarning, match=f"{message}` argument"):
        assert kind(4, elementwise_affine=True).weight is not None
    with pytest.warns(UserWarning, match=message), pytest.raises(AmpValueError, match=f"{message} = False`"):
        kind(4, elementwise_affine=False)


@pytest.mark.cuda
@pytest.mark.parametrize("kind", [*MODULES, FastLayerNorm])
@pytest.mark.parametrize(("input_dtype", "parameter_dtype"), [(F32, F32), (F16, F16), (B16, F32), (F32, F16)], ids=str)
def test_on_a_gpu_as_on_the_cpu(kind, input_dtype, parameter_dtype):
    module, x = kind(64).to(parameter_dtype), torch.randn(8, 64).to(input_dtype)
    expected = module(x)
    torch.testing.assert_close(module.cuda()(x.cuda()).cpu(), expected)


# --- apex.contrib.layer_norm ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("input_dtype", "weight_dtype"), [(F32, F32), (F16, F16), (B16, F32), (F32, B16)], ids=str)
def test_fast_layer_norm(input_dtype, weight_dtype):
    module = FastLayerNorm(4, eps=EPS).to(weight_dtype)
    nn.init.constant_(module.weight, 1.5)
    x = torch.randn(2, 3, 4).to(input_dtype)
    out = module(x)
    assert out.dtype == weight_dtype
    expected = nn.functional.layer_norm(x.double(), (4,), module.weight.double(), module.bias.double(), EPS)
    torch.testing.assert_close(out, expected.to(weight_dtype))
    assert torch.equal(out, FastLayerNormFN.apply(x, module.weight, module.bias, EPS, True))
    assert torch.equal(out, _fast_layer_norm(x, module.weight, module.bias, EPS, False))
    module = FastLayerNorm(4)
    assert (module.epsilon, module.memory_efficient) == (1e-5, False)
    assert {name: p.tolist() for name, p in module.named_parameters()} == {"weight": [1.0] * 4, "bias": [0.0] * 4}
