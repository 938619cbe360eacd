"""forward and backward of apex's autograd classes, for programs with a context of their own, and apex's casts."""

import inspect

import pytest
import torch
from apex import _autocast_utils
from apex.contrib.layer_norm.layer_norm import FastLayerNormFN
from apex.contrib.xentropy import SoftmaxCrossEntropyLoss
from apex.normalization import fused_layer_norm as norms

F16, B16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
NORM = ["normalized_shape", "eps", "memory_efficient"]
LAYER, RMS = ["input", "weight", "bias"], ["input", "weight"]
# Class -> apex's arguments of forward, the shapes of its tensors, the arguments before and after them.
CLASSES = {
    norms.FusedLayerNormFunction: (["input", *NORM], [(5, 4)], (), ((4,), 0.1)),
    norms.FusedLayerNormAffineFunction: ([*LAYER, *NORM], [(5, 4), (4,), (4,)], (), ((4,), 0.1)),
    norms.FusedLayerNormAffineMixedDtypesFunction: ([*LAYER, *NORM], [(5, 4), (4,), (4,)], (), ((4,), 0.1)),
    norms.FusedRMSNormFunction: (["input", *NORM], [(5, 4)], (), ((4,), 0.1)),
    norms.FusedRMSNormAffineFunction: ([*RMS, *NORM], [(5, 4), (4,)], (), ((4,), 0.1)),
    norms.FusedRMSNormAffineMixedDtypesFunction: ([*RMS, *NORM], [(5, 4), (4,)], (), ((4,), 0.1)),
    FastLayerNormFN: (["x", "gamma", "beta", "epsilon", "memory_efficient"], [(5, 4), (4,), (4,)], (), (0.1,)),
    SoftmaxCrossEntropyLoss: (
        ["logits", "labels", "smoothing", "padding_idx", "half_to_float"],
        [(5, 4)],
        (),
        (torch.tensor([0, 3, 1, 2, 3]), 0.1, 3),
    ),
}
each_class = pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)


def tensors(kind, dtype=F64):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in CLASSES[kind][1]]


def of_program(kind):
    """A program's autograd class around ``kind``, of the tensors alone."""
    _, shapes, first, last = CLASSES[kind]

    class Program(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            return kind.forward(ctx, *first, *tensors, *last)

        @staticmethod
        def backward(ctx, grad_output):
            grads = kind.backward(ctx, grad_output)
            assert grads[: len(first)] == (None,) * len(first)
            # One for each argument, as autograd wants them; apex's classes take a last one that has a default.
            assert not any(grad is not None for grad in grads[len(first) + len(shapes) :])
            return grads[len(first) : len(first) + len(shapes)]

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
def test_values_and_gradients_are_those_of_apply(kind):
    _, _, first, last = CLASSES[kind]
    ours, theirs = tensors(kind, F32), tensors(kind, F32)
    out, wanted = kind.apply(*first, *ours, *last), of_program(kind).apply(*theirs)
    assert torch.equal(out, wanted)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    out.backward(upstream)
    wanted.backward(upstream)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(b.grad, a.grad)


@each_class
def test_a_context_without_autograd(kind):
    """Such as that of a program's own recomputation: it has save_for_backward and saved_tensors."""
    _, shapes, first, last = CLASSES[kind]

    class Context:
        def save_for_backward(self, *tensors):
            self.saved_tensors = tensors

    context, values = Context(), [t.detach() for t in tensors(kind, F32)]
    out = kind.forward(context, *first, *values, *last)
    grads = kind.backward(context, torch.ones_like(out))
    leaves = [t.requires_grad_() for t in values]
    wanted = torch.autograd.grad(kind.apply(*first, *leaves, *last).sum(), leaves)
    assert len(grads) >= len(first) + len(shapes)
    torch.testing.assert_close(grads[len(first) : len(first) + len(shapes)], wanted)


@each_class
def test_a_subclass_has_its_own_forward_and_backward(kind):
    _, _, first, last = CLASSES[kind]

    class Doubled(kind):
        @staticmethod
        def forward(ctx, *arguments):
            return 2.0 * kind.forward(ctx, *arguments)

        @staticmethod
        def backward(ctx, grad_output):
            given = len(first) + len(CLASSES[kind][1]) + len(last)
            return kind.backward(ctx, 2.0 * grad_output)[:given]

    values = tensors(kind)
    assert torch.equal(Doubled.apply(*first, *values, *last), 2.0 * kind.apply(*first, *values, *last))
    assert torch.autograd.gradcheck(lambda *t: Doubled.apply(*first, *t, *last), values)


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


@pytest.mark.full(but=2)
@pytest.mark.parametrize("kind", [norms.FusedLayerNormAffineFunction, FastLayerNormFN])
def test_apply_compiles_as_one_graph(kind):
    _, _, first, last = CLASSES[kind]
    values = tensors(kind, F32)
    compiled = torch.compile(lambda *t: kind.apply(*first, *t, *last), backend="eager", fullgraph=True)
    assert torch.equal(compiled(*values), kind.apply(*first, *values, *last))


# --- apex._autocast_utils ---------------------------------------------------------------------------------------------


def test_casts_where_autocast_is_on():
    given = (torch.ones(2), 3, None, "x", [torch.ones(1), (torch.ones(1),)], {"k": torch.ones(1)})
    assert _autocast_utils._cast_if_autocast_enabled(*given)[0] is given[0]
    with torch.autocast("cpu", B16):
        one, number, none, text, (first, (second,)), named = _autocast_utils._cast_if_autocast_enabled(*given)
        assert (number, none, text) == (3, None, "x")
        assert {t.dtype for t in (one, first, second, named["k"])} == {B16}
        with torch.autocast("cpu", enabled=False):
            assert _autocast_utils._cast_if_autocast_enabled(*given)[0].dtype == F32


@pytest.mark.parametrize("dtype", [F64, torch.int64, torch.bool], ids=str)
def test_what_autocast_leaves(dtype):
    value = torch.ones(2, dtype=dtype)
    with torch.autocast("cpu", B16):
        assert _autocast_utils._cast_if_autocast_enabled(value)[0] is value
        assert _autocast_utils._cast_if_autocast_enabled(torch.ones(2, device="meta"))[0].dtype == F32


def test_casts_are_differentiable():
    x = torch.ones(2, requires_grad=True)
    with torch.autocast("cpu", B16):
        (cast,) = _autocast_utils._cast_if_autocast_enabled(x)
    cast.sum().backward()
    assert x.grad.tolist() == [1.0, 1.0]
