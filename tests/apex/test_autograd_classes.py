"""forward and backward of apex's autograd classes, for programs with a context of their own, and apex's casts."""

import inspect

import pytest
import torch
from apex import _autocast_utils
from apex.contrib.layer_norm.layer_norm import FastLayerNormFN
from apex.contrib.xentropy import SoftmaxCrossEntropyLoss
from apex.normalization import fused_layer_norm as norms

B16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
NORM = ["normalized_shape", "eps", "memory_efficient"]
LAYER, RMS = ["input", "weight", "bias"], ["input", "weight"]
# Class -> apex's arguments of forward, the shapes of its tensors, and the arguments after them.
CLASSES = {
    norms.FusedLayerNormFunction: (["input", *NORM], [(5, 4)], ((4,), 0.1)),
    norms.FusedLayerNormAffineFunction: ([*LAYER, *NORM], [(5, 4), (4,), (4,)], ((4,), 0.1)),
    norms.FusedLayerNormAffineMixedDtypesFunction: ([*LAYER, *NORM], [(5, 4), (4,), (4,)], ((4,), 0.1)),
    norms.FusedRMSNormFunction: (["input", *NORM], [(5, 4)], ((4,), 0.1)),
    norms.FusedRMSNormAffineFunction: ([*RMS, *NORM], [(5, 4), (4,)], ((4,), 0.1)),
    norms.FusedRMSNormAffineMixedDtypesFunction: ([*RMS, *NORM], [(5, 4), (4,)], ((4,), 0.1)),
    FastLayerNormFN: (["x", "gamma", "beta", "epsilon", "memory_efficient"], [(5, 4), (4,), (4,)], (0.1,)),
    SoftmaxCrossEntropyLoss: (
        ["logits", "labels", "smoothing", "padding_idx", "half_to_float"],
        [(5, 4)],
        (torch.tensor([0, 3, 1, 2, 3]), 0.1, 3),
    ),
}
each_class = pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)


def tensors(kind, dtype=F64):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in CLASSES[kind][1]]


def of_program(kind):
    """A program's autograd class around ``kind``, of the tensors alone."""
    _, shapes, last = CLASSES[kind]

    class Program(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            return kind.forward(ctx, *tensors, *last)

        @staticmethod
        def backward(ctx, grad_output):
            grads = kind.backward(ctx, grad_output)
            # One for each argument, as autograd wants them; apex's classes take a last one that has a default.
            assert not any(grad is not None for grad in grads[len(shapes) :])
            return grads[: len(shapes)]

    return Program


@each_class
def test_forward_has_apexs_arguments(kind):
    """Programs look for memory_efficient there."""
    names = CLASSES[kind][0]
    specification = inspect.getfullargspec(kind.forward)
    assert specification.args == ["ctx", *names]
    assert specification.varargs is None
    assert len(inspect.getfullargspec(kind.backward).args) == 2


@each_class
def test_gradients(kind):
    function, values = of_program(kind), tensors(kind)
    assert torch.autograd.gradcheck(function.apply, values)
    assert torch.autograd.gradgradcheck(function.apply, values)


# --- apex._autocast_utils ---------------------------------------------------------------------------------------------


def test_casts_where_autocast_is_on():
    given = (torch.ones(2, requires_grad=True), 3, None, "x", [torch.ones(1), (torch.ones(1),)], {"k": torch.ones(1)})
    assert _autocast_utils._cast_if_autocast_enabled(*given)[0] is given[0]
    with torch.autocast("cpu", B16):
        one, number, none, text, (first, (second,)), named = _autocast_utils._cast_if_autocast_enabled(*given)
        assert (number, none, text) == (3, None, "x")
        assert {t.dtype for t in (one, first, second, named["k"])} == {B16}
        with torch.autocast("cpu", enabled=False):
            assert _autocast_utils._cast_if_autocast_enabled(*given)[0].dtype == F32
    one.sum().backward()
    assert given[0].grad.tolist() == [1.0, 1.0]
