"""forward and backward of apex's autograd classes, for programs with a context of their own, and apex's casts."""

import inspect

import pytest
import torch
from apex import _autocast_utils
from apex.contrib.layer_norm.layer_norm import FastLayerNormFN
from apex.contrib.xentropy import SoftmaxCrossEntropyLoss
from apex.normalization import fused_layer_norm as norms
from kit import traces_switches

F16, B16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
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


@each_class
def test_a_context_without_autograd(kind):
    """Such as that of a program's own recomputation: it has save_for_backward and saved_tensors."""
    _, shapes, last = CLASSES[kind]

    class Context:
        def save_for_backward(self, *tensors):
            self.saved_tensors = tensors

    context, values = Context(), [t.detach() for t in tensors(kind, F32)]
    out = kind.forward(context, *values, *last)
    grads = kind.backward(context, torch.ones_like(out))
    leaves = [t.requires_grad_() for t in values]
    expected = kind.apply(*leaves, *last)
    assert torch.equal(out, expected)
    wanted = torch.autograd.grad(expected.sum(), leaves)
    assert len(grads) >= len(shapes)
    torch.testing.assert_close(grads[: len(shapes)], wanted)


@each_class
def test_a_subclass_has_its_own_forward_and_backward(kind):
    last = CLASSES[kind][2]

    class Doubled(kind):
        @staticmethod
        def forward(ctx, *arguments):
            return 2.0 * kind.forward(ctx, *arguments)

        @staticmethod
        def backward(ctx, grad_output):
            given = len(CLASSES[kind][1]) + len(last)
            return kind.backward(ctx, 2.0 * grad_output)[:given]

    values = tensors(kind)
    assert torch.equal(Doubled.apply(*values, *last), 2.0 * kind.apply(*values, *last))
    assert torch.autograd.gradcheck(lambda *t: Doubled.apply(*t, *last), values)


@pytest.mark.parametrize(("dtype", "parameter_dtype"), [(F16, F32), (B16, F32), (F32, B16)], ids=str)
@pytest.mark.parametrize("kind", [k for k in CLASSES if "Affine" in k.__name__ or k is FastLayerNormFN])
def test_gradients_have_the_type_of_their_tensors(kind, dtype, parameter_dtype):
    values = [t.detach().to(dtype if i == 0 else parameter_dtype) for i, t in enumerate(tensors(kind))]
    for value in values:
        value.requires_grad_()
    out = of_program(kind).apply(*values)
    of_weight = "Mixed" in kind.__name__ or kind is FastLayerNormFN
    assert out.dtype == (parameter_dtype if of_weight else dtype)
    out.sum().backward()
    assert [t.grad.dtype for t in values] == [t.dtype for t in values]


@traces_switches
@pytest.mark.full(but=2)
@pytest.mark.parametrize("kind", [norms.FusedLayerNormAffineFunction, FastLayerNormFN])
def test_apply_compiles_as_one_graph(kind):
    last = CLASSES[kind][2]
    values = tensors(kind, F32)
    compiled = torch.compile(lambda *t: kind.apply(*t, *last), backend="eager", fullgraph=True)
    assert torch.equal(compiled(*values), kind.apply(*values, *last))


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


@pytest.mark.parametrize("dtype", [F64, torch.int64, torch.bool], ids=str)
def test_what_autocast_leaves(dtype):
    value = torch.ones(2, dtype=dtype)
    with torch.autocast("cpu", B16):
        assert _autocast_utils._cast_if_autocast_enabled(value)[0] is value
        assert _autocast_utils._cast_if_autocast_enabled(torch.ones(2, device="meta"))[0].dtype == F32
