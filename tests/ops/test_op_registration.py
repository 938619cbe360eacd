"""The ops as torch sees them: schemas, fake kernels, autograd, torch.compile, and the Python calls in front of them."""

import inspect
from pathlib import Path

import pytest
import torch
from backends import COMPILED, FLOATS, PLAIN_OPS, right_call, short
from emulation_build import setup_module
from optimizer_calls import STEP_OPS, UNSCALING, make_call, on_optimizers

from ampctx import optimizer_ops
from ampctx.kernels import definitions, ops, steps
from ampctx.kernels.spec import SPECS


def tensors(dtype=torch.float32, seed=0, requires_grad=False):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(3,), (0,), (2, 5)]
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_(requires_grad) for s in shapes]


FLAG, FACTOR = torch.zeros(()), torch.tensor(0.5)


def samples():
    """(id, op, arguments) of each op."""
    for dtype in FLOATS:
        name, low = short(dtype), tensors(dtype)
        yield f"scale-{name}", "multi_tensor_scale", (low, tensors(), FLAG, FACTOR)
        yield f"axpby-{name}", "multi_tensor_axpby", (low, tensors(seed=1), tensors(dtype), FLAG, FACTOR, FACTOR, -1)
        yield f"l2norm-{name}", "multi_tensor_l2norm", (low, FLAG, True)
        yield f"unscale_l2norm-{name}", "multi_tensor_unscale_l2norm", (low, FLAG, FACTOR, False)
    yield "l2norm-fp64", "multi_tensor_l2norm", (tensors(torch.float64), FLAG, True)
    yield "l2norm-no-tensors", "multi_tensor_l2norm", ([], FLAG, True)
    yield "l2norm-requires-grad", "multi_tensor_l2norm", (tensors(requires_grad=True), FLAG, True)
    yield "scale-requires-grad", "multi_tensor_scale", (tensors(requires_grad=True), tensors(), FLAG, FACTOR)
    for name in [*PLAIN_OPS[-3:], "multi_tensor_scale_clipped"]:
        yield name, name, tuple(right_call(COMPILED, name, [(3,), (0,), (2, 5)]).values())
    for optimizer in STEP_OPS:
        for write_back in ("copy", "split", "stochastic"):
            call = make_call(COMPILED, optimizer, [3, 0, (2, 5)], param=torch.bfloat16, write_back=write_back)
            yield f"{optimizer.name}-{write_back}", optimizer.op, call.arguments(FLAG, FACTOR, FACTOR)
    call = make_call(COMPILED, STEP_OPS[0], [3, (2, 5)], skips=[torch.zeros(()) for _ in range(5)], max_norm=1.0)
    yield "adam-clipped-and-counted", STEP_OPS[0].op, call.arguments(FLAG, FACTOR, FACTOR)


# torch's own, from inside opcheck
@pytest.mark.full(but=14)
@pytest.mark.filterwarnings("ignore:.*is deprecated.*", "ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(("name", "arguments"), [pytest.param(name, args, id=i) for i, name, args in samples()])
def test_opcheck(name, arguments):
    torch.library.opcheck(getattr(torch.ops.ampctx, name).default, arguments)


def test_every_op_has_a_fallback_a_fake_kernel_and_a_compiled_kernel():
    names = {schema.partition("(")[0] for schema in definitions.SCHEMAS}
    assert names == set(definitions.FALLBACKS) == set(definitions.FAKES)
    for name in names:
        for key in ("CPU", "CompositeExplicitAutograd", "Meta"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"ampctx::{name}", key), f"{name}, {key}"


def test_the_typed_calls_are_those_of_the_specs():
    assert Path(steps.__file__).read_text() == setup_module().generator().steps_module(), "run: python csrc/generate.py"


@pytest.mark.parametrize("name", SPECS)
def test_made_calls_are_documented(name):
    call = getattr(optimizer_ops, name)
    assert name in optimizer_ops.__all__
    assert "No host sync" in inspect.getdoc(call).replace("\n", " ")
    assert list(inspect.signature(call).parameters)[:2] == ["grads", "params"]


@pytest.mark.parametrize("call", ["scale", "axpby", "update"])
def test_version_counters(call):
    x, y, flag = tensors(), tensors(seed=1), torch.zeros(())
    scale, trackers = torch.tensor(4.0), [torch.ones((), dtype=torch.int32) for _ in range(2)]
    if call == "scale":
        ops.multi_tensor_scale(x, y, flag, 2.0)
        written, read = y, x
    elif call == "axpby":
        out = tensors(seed=2)
        ops.multi_tensor_axpby(x, y, out, flag, 1.0, 1.0)
        written, read = out, x + y
    else:
        ops.update_scale(scale, *trackers, flag)
        written, read = [scale, *trackers], [flag]
    assert all(t._version == 1 for t in written)
    assert all(t._version == 0 for t in read)


@on_optimizers
@pytest.mark.usefixtures("reference")
def test_optimizer_calls(optimizer):
    """The typed calls: the same as the op, by names; floats and tensors as factors; autograd hears of what changed."""
    how = {"param": torch.bfloat16, "write_back": "split"}
    clip = {"grad_norm": torch.tensor(4.0), "max_norm": 1.0, "skips": [torch.zeros(()) for _ in range(5)]}
    call = make_call(COMPILED, optimizer, [3, 0, (2, 5)], **how, **clip)
    expected = call.expected(inv_scale=0.5, lr=0.25)
    typed = getattr(optimizer_ops, optimizer.op.removeprefix("multi_tensor_"))
    options = {
        name: value for name, value in {**call.options, **how}.items() if name in inspect.signature(typed).parameters
    }
    typed(**call.lists, found_inf=torch.zeros(()), inv_scale=torch.tensor(0.5), lr=0.25, **options)
    call.assert_agrees(expected)
    assert {t._version for t in call["grads"]} == {0}
    assert all(max(t._version for t in call[name]) >= 1 for name in ("params", "extras"))


def test_python_calls_take_floats_and_tensors():
    x, flag = tensors(), torch.zeros(())
    for factor in (0.5, torch.tensor(0.5), torch.tensor([0.5], dtype=torch.float64)):
        out = tensors(seed=1)
        ops.multi_tensor_scale(x, out, flag, factor)
        assert torch.equal(out[2], x[2] * 0.5)
        ops.multi_tensor_axpby(x, x, out, flag, factor, 1.0)
        assert torch.equal(out[2], x[2] * 1.5)
        norm, per_tensor = ops.multi_tensor_unscale_l2norm(x, flag, factor, per_tensor=True)
        torch.testing.assert_close(norm, torch.cat([t.flatten() for t in x]).norm() * 0.5)
        assert per_tensor[1] == 0
    assert ops.multi_tensor_l2norm(x, flag)[1].shape == (0,)


def test_only_the_op_that_writes_gradients_says_so():
    for pair in zip(STEP_OPS, UNSCALING, strict=True):
        reads, writes = (getattr(COMPILED.ops, o.op).default._schema.arguments[0].alias_info for o in pair)
        assert reads is None
        assert writes.is_write
