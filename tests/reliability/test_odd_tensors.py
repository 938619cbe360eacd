"""Multi-tensor kernels are right on odd inputs: empty tensors anywhere in a list, 2^31 elements and more, layouts that
differ, freed memory, tensors of another device; the result is that of a computation tensor by tensor, or an error that
names list and index. So are steps of sparse, complex and double parameters, or they are refused by name."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from fuzz_ops import fuzz
from kit import INF, NAN, OPTIMIZERS, backward, larc, same, start
from odd_models import OddModel, gradients, loss_of
from odd_tensors import make_odd
from torch import nn

from ampctx import clip_grad_norm_, ops, optimizer_ops
from ampctx._errors import AmpError
from ampctx.amp import GradScaler, master_params
from ampctx.optimizers import FusedAdam, FusedSGD

HUGE = (1 << 31) + 1
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")


# --- odd tensors in the ops -------------------------------------------------------------------------------------------

# Besides those of test_op_errors.py.
REFUSED = {
    "freed": "has no memory: its storage has been freed or made smaller",
    "freed-view": "has no memory: its storage has been freed or made smaller",
    "shrunk": "has no memory: its storage has been freed or made smaller",
    "shrunk-view": "has no memory: its storage has been freed or made smaller",
    "overlapping-windows": "is not contiguous: its elements do not fill one block of memory",
    "zero-tensor": "is not contiguous: its elements do not fill one block of memory",
    "csr": "is not a strided tensor",
    "mkldnn": "is not a strided tensor",
    "conjugated": "has dtype torch.complex64, expected float32, float16, bfloat16 or float64",
    "float8": "has dtype torch.float8_e4m3fn, expected float32, float16, bfloat16 or float64",
    "quantized": "has dtype torch.qint8, expected float32, float16, bfloat16 or float64",
    "bool": "has dtype torch.bool, expected float32, float16, bfloat16 or float64",
}


@pytest.mark.filterwarnings("ignore:.*quantize.*deprecated", "ignore:Sparse CSR", "ignore:torch.ao.quantization")
@pytest.mark.parametrize(("name", "message"), REFUSED.items(), ids=REFUSED.keys())
def test_what_no_kernel_can_take_is_refused_by_list_and_index(name, message):
    src, dst, found_inf = [torch.ones(4), make_odd(name, 4)], [torch.zeros(4), torch.zeros(4)], torch.zeros(())
    with pytest.raises(RuntimeError, match=re.escape(f"multi_tensor_scale: src[1] {message}")):
        ops.multi_tensor_scale(src, dst, found_inf, 2.0)
    assert not any(d.any() for d in dst)
    assert found_inf == 0


FROM_ELSEWHERE = {
    "src": ([torch.ones(2, device="meta"), torch.ones(2)], [torch.zeros(2), torch.zeros(2)]),
    "dst": ([torch.ones(2), torch.ones(2)], [torch.zeros(2), torch.zeros(2, device="meta")]),
}


@pytest.mark.parametrize("lists", FROM_ELSEWHERE.values(), ids=FROM_ELSEWHERE.keys())
def test_one_meta_tensor_does_not_turn_a_call_into_nothing(lists):
    message = "ampctx: an op takes tensors of one device, and got cpu and meta"
    with pytest.raises(RuntimeError, match=message):
        ops.multi_tensor_scale(*lists, torch.zeros(()), 2.0)
    with pytest.raises(RuntimeError, match=message):
        ops.multi_tensor_l2norm([torch.ones(2)], torch.zeros((), device="meta"))
    trackers = [torch.zeros((), dtype=torch.int32) for _ in range(2)]
    with pytest.raises(RuntimeError, match=message):
        ops.update_scale(torch.ones(()), *trackers, torch.zeros((), device="meta"))


@pytest.mark.parametrize("name", ["freed", "shrunk-view", "sparse"])
def test_scalars_without_a_number_are_refused_by_name(name):
    lists, odd = ([torch.ones(3)], [torch.ones(3)]), make_odd(name, 1)
    why = "is not a strided tensor" if name == "sparse" else "has no memory"
    with pytest.raises(RuntimeError, match=f"multi_tensor_scale: found_inf {why}"):
        ops.multi_tensor_scale(*lists, odd, 2.0)
    with pytest.raises(RuntimeError, match=f"multi_tensor_scale: scale {why}"):
        ops.multi_tensor_scale(*lists, torch.zeros(()), odd)
    arguments = (*lists, [], [], [odd], torch.zeros(()), 1.0, 0.1)
    with pytest.raises(RuntimeError, match=rf"multi_tensor_sgd: steps\[0\] {why}"):
        optimizer_ops.sgd(*arguments)


@pytest.mark.parametrize("tensors", [[], [torch.ones(3)]], ids=["no-tensors", "one-tensor"])
def test_none_is_refused_by_name(tensors):
    with pytest.raises(RuntimeError, match="multi_tensor_scale: found_inf is None, expected a tensor"):
        torch.ops.ampctx.multi_tensor_scale.default(tensors, tensors, None, torch.ones(()))
    with pytest.raises(RuntimeError, match="multi_tensor_scale: scale is None, expected a tensor"):
        torch.ops.ampctx.multi_tensor_scale.default(tensors, tensors, torch.zeros(()), None)


@pytest.mark.parametrize("name", ["negative-view", "requires-grad", "parameter", "subclass", "inference", "0-d"])
def test_what_only_looks_odd_is_read_right(name):
    src = make_odd(name, 4)
    dst = torch.zeros(src.shape)
    with torch.no_grad():
        ops.multi_tensor_scale([src], [dst], torch.zeros(()), 2.0)
        assert torch.equal(dst, torch.Tensor(src.clone().as_subclass(torch.Tensor)) * 2)


def test_step_counts_that_no_integer_holds():
    """They feed the random numbers of stochastic rounding; any will do, and the same everywhere."""
    for count in (float("nan"), float("inf"), 1e30, -1e30):
        p = [torch.ones(100, dtype=torch.bfloat16)]
        step = [torch.tensor(count)]
        optimizer_ops.sgd(
            [torch.ones(100)], p, [], [], step, torch.zeros(()), 1.0, 0.001, write_back="stochastic", seed=3
        )
        assert ((p[0] == 1) | (p[0] == 1 - 2**-8)).all()


# --- through amp, GradScaler, clipping and the optimizers -------------------------------------------------------------

SGD, ADAM = partial(torch.optim.SGD, lr=0.5, momentum=0.5), partial(torch.optim.Adam, lr=0.1)
# The optimizer, and what does the same in fp64: torch's where it has one.
PAIRS = {
    "SGD-plain": (partial(SGD, foreach=False), SGD),
    "SGD-foreach": (partial(SGD, foreach=True), SGD),
    "SGD-fused": (partial(SGD, fused=True), SGD),
    "Adam-plain": (partial(ADAM, foreach=False), ADAM),
    "Adam-foreach": (partial(ADAM, foreach=True), ADAM),
    "Adam-fused": (partial(ADAM, fused=True), ADAM),
    "FusedAdam": (partial(FusedAdam, lr=0.1), ADAM),
    "FusedAdam-kahan": (partial(FusedAdam, lr=0.1, write_back="kahan"), ADAM),
    "FusedSGD": (partial(FusedSGD, lr=0.5, momentum=0.5), SGD),
    "FusedAdagrad": (partial(OPTIMIZERS["FusedAdagrad"], lr=0.1), partial(torch.optim.Adagrad, lr=0.1, eps=1e-10)),
    "FusedLAMB": (partial(OPTIMIZERS["FusedLAMB"], lr=0.1),) * 2,
    "FusedNovoGrad": (partial(OPTIMIZERS["FusedNovoGrad"], lr=0.1),) * 2,
    "LARC": (partial(larc, lr=0.5, momentum=0.0),) * 2,
}
few_levels = pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])


def assert_agree(parameters, expected) -> None:
    for i, (p, e) in enumerate(zip(parameters, expected, strict=True)):
        torch.testing.assert_close(
            p.detach().to(e.dtype), e.detach(), rtol=2e-5, atol=1e-5, msg=lambda text, i=i: f"parameter {i}: {text}"
        )


ODD_MODELS = [(name, which) for name in PAIRS for which in ("odd", "all-empty")]
ODD_MODELS += [(name, "complex") for name in PAIRS if name.endswith(("plain", "foreach"))]


@pytest.mark.full(but=40)
@pytest.mark.parametrize(("name", "which"), ODD_MODELS)
@few_levels
def test_steps_of_an_odd_model_are_those_of_fp64(session, name, level, which):
    # torch (2.13) walks the memory of a fused parameter as if it had no gaps, on the CPU, without amp too.
    with_gaps = name not in ("SGD-fused", "Adam-fused")
    model = OddModel(with_gaps, with_complex=which == "complex", all_empty=which == "all-empty")
    expected, (make, exact) = model.exact(), PAIRS[name]
    reference = exact(expected)
    _, optimizer = start(session, level, make, model, loss_scale=64.0)
    assert which != "complex" or model.cplx.dtype == torch.complex64
    for i in range(3):
        wanted = gradients(model, seed=i)
        backward(session, loss_of(list(model.parameters()), wanted), optimizer)
        loss_of(expected, wanted).backward()
        norms = [clip_grad_norm_(p, 1.0) for p in (master_params(optimizer), expected)]
        torch.testing.assert_close(norms[0].double(), norms[1].double(), rtol=1e-6, atol=0)
        for o in (optimizer, reference):
            o.step()
            o.zero_grad()
    assert_agree(master_params(optimizer), expected)


@pytest.mark.parametrize("through", ["scale_loss", "GradScaler"])
def test_fused_torch_optimizers_and_parameters_with_gaps(session, through):
    """torch would step the memory between the elements."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(8)[::2])])
    optimizer, step = torch.optim.SGD(model.parameters(), lr=1.0, fused=True), None
    if through == "scale_loss":
        start(session, "O1", lambda _: optimizer, model, loss_scale=8.0)
        backward(session, sum(p.sum() for p in model), optimizer)
        step = optimizer.step
    else:
        scaler = GradScaler("cpu")
        scaler.scale(sum(p.sum() for p in model)).backward()
        step = partial(scaler.step, optimizer)
    with pytest.raises(
        AmpError, match=r"SGD with fused=True steps the wrong memory of param_groups\[0\]\['params'\]\[1\]"
    ):
        step()
    assert not any(p.any() for p in model)
    assert not optimizer.state


# --- sparse, complex and double ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [INF, -INF, NAN])
@pytest.mark.parametrize("name", ["real", "imag", "fp64"])
def test_one_non_finite_number_skips_the_step(session, name, value):
    """Of a GradScaler: test_grad_scaler.py."""
    model, optimizer = start(session, "O1", partial(torch.optim.SGD, lr=0.5), OddModel(with_complex=True))
    before = [p.detach().clone() for p in model.parameters()]
    with session.scale_loss(loss_of(list(model.parameters()), gradients(model, seed=0)), optimizer) as scaled:
        scaled.backward()
        (model.fp64.grad if name == "fp64" else getattr(model.cplx.grad, name))[-1] = value
    optimizer.step()
    assert session.skipped_steps(optimizer) == 1
    assert same(model.parameters(), before)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("blocks", [1, 2], ids=["once", "accumulated"])
def test_sparse_complex_gradients_keep_their_imaginary_part(session, level, blocks):
    z = nn.Parameter(torch.zeros(4, 2, dtype=torch.complex64))
    _, optimizer = start(session, level, partial(torch.optim.SGD, lr=1.0), nn.ParameterList([z]), loss_scale=8.0)
    for _ in range(blocks):
        with session.scale_loss(torch.zeros(()), optimizer):
            values = torch.full((3, 2), 8 + 16j, dtype=torch.complex64)
            z.grad = torch.sparse_coo_tensor([[0, 0, 2]], values, (4, 2), check_invariants=True)
    optimizer.step()
    assert z[:, 0].tolist() == [blocks * (-2 - 4j), 0, blocks * (-1 - 2j), 0]


@few_levels
@pytest.mark.parametrize("tokens", [[1, 1, 1, 4], [4]], ids=["duplicates", "one"])
@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.SparseAdam, torch.optim.Adagrad])
def test_sparse_embeddings_step_as_in_fp64(session, level, tokens, cls):
    torch.manual_seed(0)
    model = nn.Embedding(6, 3, sparse=True)
    expected = nn.Embedding(6, 3, sparse=True, _weight=model.weight.detach().double().clone()).double()
    reference = cls(expected.parameters(), lr=0.1)
    _, optimizer = start(session, level, partial(cls, lr=0.1), model, loss_scale=64.0)
    factors = torch.arange(1.0, 4.0)
    for _ in range(2):
        backward(session, (model(torch.tensor(tokens)).float() * factors).sum(), optimizer)
        (expected(torch.tensor(tokens)) * factors).sum().backward()
        for o in (optimizer, reference):
            o.step()
            o.zero_grad()
    (master,) = master_params(optimizer)
    torch.testing.assert_close(master.double(), expected.weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value", [40000.0, -40000.0], ids=["up", "down"])
@pytest.mark.parametrize("dense_too", [False, True], ids=["alone", "with-dense"])
def test_uncoalesced_fp16_duplicates_whose_sum_overflows_are_found(session, value, dense_too):
    model = nn.ModuleDict(
        {"table": nn.Embedding(4, 1, sparse=True), **({"head": nn.Linear(1, 1)} if dense_too else {})}
    )
    _, optimizer = start(session, "O2", partial(torch.optim.SGD, lr=0.5), model, loss_scale="dynamic")
    before = [p.detach().clone() for p in model.parameters()]
    with session.scale_loss(torch.zeros(()), optimizer):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        weight, values = model["table"].weight, torch.full((2, 1), value).half()
        weight.grad = torch.sparse_coo_tensor([[1, 1]], values, (4, 1), check_invariants=True)
        assert weight.grad._values().isfinite().all()  # uncoalesced: values() refuses
    optimizer.step()
    assert session.skipped_steps(optimizer) == 1
    assert same(model.parameters(), before)


# --- large, and on a second device ------------------------------------------------------------------------------------


@pytest.mark.large
def test_a_step_of_more_than_2_to_the_31_elements():
    """13 GB: the last elements are unscaled, counted in the norm, and stepped; inf behind 2^31 is seen."""
    p = nn.Parameter(torch.ones(HUGE, dtype=torch.bfloat16))
    optimizer, scaler = FusedSGD([p], lr=1.0), GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    p.grad = torch.full_like(p, 2.0)
    scaler.unscale_(optimizer)
    norm = clip_grad_norm_([p], 1e9)
    torch.testing.assert_close(norm.item(), (HUGE / 4) ** 0.5, rtol=1e-4, atol=0)
    scaler.step(optimizer)
    scaler.update()
    assert p[0] == p[HUGE // 2] == p[-1] == 0.5
    assert p.max() == p.min() == 0.5
    p.grad[-1] = float("inf")
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert p.min() == 0.5


@pytest.mark.cuda
def test_a_device_that_is_not_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    tensors = [torch.ones(n, device="cuda:1") for n in (0, 5, 5000, 0)]
    flag = torch.zeros((), device="cuda:1")
    with torch.cuda.device(0):
        ops.multi_tensor_scale(tensors, tensors, flag, 2.0)
        norm, _ = ops.multi_tensor_l2norm(tensors, flag)
        with pytest.raises(RuntimeError, match=re.escape("src[1] is on cuda:0, src[0] is on cuda:1")):
            ops.multi_tensor_scale([tensors[1], torch.ones(5, device="cuda:0")], tensors[1:2] * 2, flag, 2.0)
    assert norm.item() == pytest.approx((4 * 5005) ** 0.5)


# --- the fuzzer -------------------------------------------------------------------------------------------------------


def test_hundreds_of_wrong_calls(pytestconfig):
    """fuzz_ops.py tells what is promised; `make test-hard` runs it for minutes."""
    found = fuzz(seed=0, calls=800 if pytestconfig.getoption("full") else 200)
    assert found["crashes"] == found["wrong"] == []
    assert found["calls"] > found["accepted"] > 0
