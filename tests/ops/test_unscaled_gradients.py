"""Steps that leave unscaled gradients: the product that the step computes with, stored by the same kernel, on every
backend; besides that the step without it."""

from dataclasses import replace

import pytest
import torch
from backends import FLOATS, REFERENCE, combination_id, combinations, short
from optimizer_calls import ADAM, LAMB, STEP_OPS, UNSCALING, bits, make_call, on_kernels, takes

from ampctx.kernels.reference_steps import WRITE_BACKS

pytestmark = [on_kernels, pytest.mark.usefixtures("reference")]
on_unscaling = pytest.mark.parametrize("optimizer", UNSCALING, ids=lambda o: o.name)
SMALL = [5, 0, 700, 1, 64]
PLAIN = {unscaling.name: plain for unscaling, plain in zip(UNSCALING, STEP_OPS, strict=True)}


def plain(call):
    """The same call of the op that leaves gradients alone."""
    return replace(call.clone(), optimizer=PLAIN[call.optimizer.name])


def assert_unscales(backend, call, inv_scale, **how):
    """All but the gradients is what the other op of this backend makes of it, to the last bit."""
    expected, grads = plain(call), [g.clone() for g in call["grads"]]
    reference = call.clone().run(REFERENCE, inv_scale=inv_scale, **how) if backend.device == "cpu" else None
    expected.run(backend, inv_scale=inv_scale, **how)
    call.run(backend, inv_scale=inv_scale, **how)
    factor = torch.as_tensor(inv_scale, dtype=torch.float32).to(backend.device)
    expected.lists["grads"] = [(g.float() * factor).to(g.dtype) for g in grads]
    call.assert_same(expected)
    if reference is not None:
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(call["grads"], reference["grads"], strict=True))


def every(dtypes):
    return [(*d, way) for d in combinations(dtypes, 2) for way in WRITE_BACKS if takes(way, d[1])]


@pytest.mark.full(but=48)
@pytest.mark.parametrize("maximize", [False, True], ids=["minimize", "maximize"])
@pytest.mark.parametrize(("grad", "param", "write_back"), every(FLOATS))
@on_unscaling
def test_gradients_keep_what_the_step_computes_with(backend, optimizer, grad, param, write_back, maximize):
    what = {"grad": grad, "param": param, "write_back": write_back, "maximize": maximize}
    assert_unscales(backend, make_call(backend, optimizer, SMALL, **what), 0.3)


@pytest.mark.parametrize("extra", FLOATS[1:], ids=short)
@pytest.mark.parametrize("grad", FLOATS, ids=short)
@pytest.mark.parametrize("optimizer", [o for o in UNSCALING if o.op.endswith(("_adam", "_sgd"))], ids=lambda o: o.name)
def test_beside_16_bit_copies_of_fp32_weights(backend, optimizer, grad, extra):
    """Loops of their own on the CPU, which convert on the way."""
    call = make_call(backend, optimizer, [5, 0, 2100], grad=grad, extra=extra, write_back="copy")
    assert_unscales(backend, call, 1 / 3)


@on_unscaling
def test_a_step_that_is_skipped_changes_no_bit(backend, optimizer):
    call = make_call(backend, optimizer, SMALL, grad=torch.float16)
    before = call.clone()
    call.run(backend, found_inf=backend.flag(1))
    call.assert_same(before)


@pytest.mark.parametrize("grad", FLOATS, ids=short)
@pytest.mark.parametrize("inv_scale", [0.3, 2.0**-140, 2.0**120, torch.tensor(1.5)], ids=str)
def test_what_overflows_and_underflows_is_stored_as_copies_round_it(backend, grad, inv_scale):
    call = make_call(backend, UNSCALING[0], SMALL, grad=grad)
    special = [float("inf"), float("-inf"), -0.0, 0.0, torch.finfo(grad).max]
    call["grads"][0].copy_(torch.tensor(special, dtype=grad))
    call["grads"][2][:2] = torch.tensor([torch.finfo(grad).tiny, -torch.finfo(grad).smallest_normal], dtype=grad)
    if isinstance(inv_scale, torch.Tensor):
        inv_scale = inv_scale.to(backend.device)
    for c in (call, expected := plain(call)):
        c.run(backend, inv_scale=inv_scale)
    grads = [(g.float() * torch.as_tensor(inv_scale, dtype=torch.float32)).to(grad) for g in expected["grads"]]
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(call["grads"], grads, strict=True))


def test_nan_stays_nan(backend):
    call = make_call(backend, UNSCALING[0], SMALL, grad=torch.bfloat16)
    call["grads"][2][3] = float("nan")
    call.run(backend)
    assert call["grads"][2].isnan().nonzero().tolist() == [[3]]


@pytest.mark.parametrize("op", [ADAM.op, LAMB.op], ids=["one-walk", "several-walks"])
@pytest.mark.parametrize("shape", [(6, 35), (4, 3, 5, 7)], ids=["transposed", "channels-last"])
def test_dense_layouts_other_than_contiguous(backend, op, shape):
    optimizer = next(o for o in UNSCALING if o.op.replace("unscaling_", "") == op)
    call = make_call(backend, optimizer, [shape, (3,)])
    for name in call.elementwise:
        call[name][0] = call[name][0].transpose(0, 1)
    assert_unscales(backend, call, 0.3)


@pytest.mark.parametrize("name", ["adam", "lamb"])
def test_several_launches_of_each_kernel(backend, name):
    optimizer = next(o for o in UNSCALING if o.name == name)
    call = make_call(backend, optimizer, [i % 5 for i in range(340)], grad=torch.float16)
    assert_unscales(backend, call, 0.3)


@pytest.mark.full(but=4)
@pytest.mark.parametrize("dtypes", [d for d in combinations((torch.float32, torch.float64), 2) if d[0] != d[1]])
def test_fp64(backend, dtypes):
    call = make_call(backend, UNSCALING[0], SMALL, grad=dtypes[0], param=dtypes[1])
    grads = [g.clone() for g in call["grads"]]
    if not backend.fp64:
        with pytest.raises(RuntimeError, match="multi_tensor_unscaling_adam: .* has dtype torch.float64"):
            call.run(backend)
        return
    call.run(backend, inv_scale=0.3)
    want = [(g.double() * 0.3).to(g.dtype) for g in grads]
    assert all(torch.equal(a, b) for a, b in zip(call["grads"], want, strict=True)), combination_id(dtypes)


def test_only_the_op_that_writes_gradients_says_so(backend):
    for pair in zip(STEP_OPS, UNSCALING, strict=True):
        reads, writes = (getattr(backend.ops, o.op).default._schema.arguments[0].alias_info for o in pair)
        assert reads is None
        assert writes.is_write
