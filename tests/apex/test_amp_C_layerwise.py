"""amp_C's LAMB functions and LARS against their formulas in fp64."""

import amp_C
import pytest
import torch
from apex.multi_tensor_apply import multi_tensor_applier
from apex.optimizers import FusedLAMB
from kernel_cases import DEVICES, FLOATS, SIZES, assert_lists, assert_same, copies, flag, randn, wide

OPTION = pytest.mark.parametrize
F32 = torch.float32
LR, BETA1, BETA2, EPS = 0.05, 0.9, 0.99, 1e-3


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def make(sizes, kinds, device="cpu"):
    """grads, params, first and second moments, and more."""
    lists = [randn(sizes, kind, seed=i, device=device) for i, kind in enumerate(kinds)]
    lists[3] = [t.abs() for t in lists[3]]
    return lists


def direction(g, p, m, v, step, bias_correction, wd, beta3, mode):
    if mode == 0:
        g = g + wd * p
    m = BETA1 * m + beta3 * g
    v = BETA2 * v + (1 - BETA2) * g**2
    c1, c2 = (1 - BETA1**step, 1 - BETA2**step) if bias_correction else (1, 1)
    u = (m / c1) / ((v / c2).sqrt() + EPS)
    return u + wd * p if mode == 1 else u, m, v


def apply(p, u, of_p, of_u, wd, nvlamb):
    adapt = (nvlamb or wd != 0) and of_p != 0 and of_u != 0
    return p - LR * (of_p / of_u if adapt else 1) * u


def lamb(row, stored, step, bias_correction, wd, averaging, mode, norm, largest, nvlamb, factor=1.0):
    """u, p, m, v after a step. The update is applied as it is stored in the gradient, in that type."""
    g, p, m, v = row[:4]
    g = g * factor / (norm / largest if norm > largest else 1)
    u, m, v = direction(g, p, m, v, step, bias_correction, wd, 1 - BETA1 if averaging else 1.0, mode)
    u = u.to(stored).double()
    return u, apply(p, u, p.norm(), u.norm(), wd, nvlamb), m, v


def assert_lamb(lists, want):
    for got, values in zip(lists, zip(*want, strict=True), strict=True):
        assert_lists(got, values)


CASES = {
    "bert": {"bias_correction": 1, "averaging": 1, "mode": 1, "wd": 0.1, "nvlamb": False},
    "l2": {"bias_correction": 1, "averaging": 1, "mode": 0, "wd": 0.1, "nvlamb": False},
    "no-decay": {"bias_correction": 1, "averaging": 1, "mode": 1, "wd": 0.0, "nvlamb": False},
    "no-decay-l2": {"bias_correction": 1, "averaging": 1, "mode": 0, "wd": 0.0, "nvlamb": None},
    "nvlamb": {"bias_correction": 1, "averaging": 1, "mode": 1, "wd": 0.0, "nvlamb": True},
    "no-averaging": {"bias_correction": 1, "averaging": 0, "mode": 1, "wd": 0.1, "nvlamb": False},
    "no-correction": {"bias_correction": 0, "averaging": 0, "mode": 0, "wd": 0.1, "nvlamb": True},
}
NORMS = {"clipped": (3.0, 1.5), "at-the-limit": (1.5, 1.5), "below": (0.5, 1.5)}


def call_lamb(lists, case, norm, largest, step, buf):
    c = CASES[case]
    of_grads = torch.tensor([norm], device=lists[0][0].device)
    args = (step, c["bias_correction"], c["wd"], c["averaging"], c["mode"], of_grads, largest, c["nvlamb"])
    amp_C.multi_tensor_lamb(65536, buf, lists, LR, BETA1, BETA2, EPS, *args)


@OPTION("norm", NORMS)
@OPTION("sizes", ["odd", "empties"])
@OPTION("kind", FLOATS)
@OPTION("case", CASES)
def test_lamb(device, case, kind, sizes, norm):
    """For two steps, whatever the flag says; the gradients become the updates."""
    dtype = FLOATS[kind]
    lists = make(SIZES[sizes], [dtype] * 4, device)
    for step in (1, 2):
        lists[0] = randn(SIZES[sizes], dtype, seed=10 + step, device=device)
        want = [lamb(row, dtype, step, **CASES[case], **dict(zip(("norm", "largest"), NORMS[norm], strict=True)))
                for row in wide(lists)]  # fmt: skip
        call_lamb(lists, case, *NORMS[norm], step, flag(1, device=device))
        assert_lamb(lists, want)


def test_lamb_through_the_applier_is_fused_lamb():
    shapes = [(40, 30), (30,), (1,)]
    ours = [torch.nn.Parameter(t) for t in randn(shapes)]
    p, m, v = randn(shapes), *([torch.zeros(s) for s in shapes] for _ in range(2))
    optimizer = FusedLAMB(ours, lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=0.01, max_grad_norm=1.0)
    buf = flag()
    for step in range(1, 5):
        g = randn(shapes, seed=step)
        for q, grad in zip(ours, g, strict=True):
            q.grad = grad.clone()
        optimizer.step()
        norm, _ = multi_tensor_applier(amp_C.multi_tensor_l2norm, buf, [g], False)
        args = (LR, BETA1, BETA2, EPS, step, 1, 0.01, 1, 1, norm, 1.0, False)
        multi_tensor_applier(amp_C.multi_tensor_lamb, buf, [g, p, m, v], *args)
        assert_lists(p, [q.detach().double() for q in ours])
    assert buf.item() == 0


def test_lamb_of_a_zero_weight_steps_by_lr_alone():
    lists = make([5, 7], [F32] * 4)
    lists[1][0].zero_()
    want = [lamb(row, F32, 1, **CASES["nvlamb"], norm=1.0, largest=2.0) for row in wide(lists)]
    call_lamb(lists, "nvlamb", 1.0, 2.0, 1, flag())
    assert_lamb(lists, want)


def test_lamb_with_a_largest_norm_of_0_leaves_gradients_as_they_are():
    lists = make([5], [F32] * 4)
    want = [lamb(row, F32, 1, **CASES["bert"], norm=1.0, largest=2.0) for row in wide(lists)]
    call_lamb(lists, "bert", 5.0, 0.0, 1, flag())
    assert_lamb(lists, want)


@OPTION("bad", [float("inf"), float("nan")], ids=str)
@OPTION("where", [0, 1], ids=["grads", "params"])
def test_lamb_raises_the_flag_and_goes_on(where, bad):
    lists = make([5, 7], [F32] * 4)
    before, buf = copies(lists), flag()
    lists[where][1][3] = bad
    call_lamb(lists, "bert", 1.0, 2.0, 1, buf)
    assert buf.tolist() == [1]
    assert not lists[1][1].isfinite().all()
    assert lists[1][0].isfinite().all()
    assert not torch.equal(lists[1][0], before[1][0])


# --- lamb_mp ----------------------------------------------------------------------------------------------------------

FACTOR = 0.25


def call_lamb_mp(lists, case, norm, largest, step, buf):
    """lr, step and norms as tensors, as the mixed-precision optimizer gives them."""
    c, device = CASES[case], lists[0][0].device
    lr, norm, largest, factor = (torch.tensor([x], device=device) for x in (LR, norm, largest, FACTOR))
    count = torch.tensor([step], dtype=torch.int32, device=device)
    options = (c["bias_correction"], c["wd"], c["averaging"], c["mode"])
    args = (norm, largest, c["nvlamb"], torch.ones(1, device=device), factor)
    amp_C.multi_tensor_lamb_mp(65536, buf, lists, lr, BETA1, BETA2, EPS, count, *options, *args)


MIXES = {
    "fp32": ("fp32",) * 4,
    "fp16": ("fp16",) * 4,
    "bf16": ("bf16",) * 4,
    "fp16-model": ("fp16", "fp32", "fp32", "fp32", "fp16"),
    "bf16-model": ("bf16", "fp32", "fp32", "fp32", "bf16"),
    "fp32-model": ("fp32", "fp32", "fp32", "fp32", "fp32"),
}


@OPTION("norm", NORMS)
@OPTION("mix", MIXES)
@OPTION("case", CASES)
def test_lamb_mp(device, case, mix, norm):
    dtypes = [FLOATS[kind] for kind in MIXES[mix]]
    lists = make(SIZES["empties"], dtypes, device)
    rule = {**CASES[case], **dict(zip(("norm", "largest"), NORMS[norm], strict=True)), "factor": FACTOR}
    want = [lamb(row, dtypes[0], 3, **rule) for row in wide(lists)]
    buf = flag(device=device)
    call_lamb_mp(lists, case, *NORMS[norm], 3, buf)
    assert_lamb(lists[:4], want)
    if len(lists) == 5:
        assert_same([lists[4]], [[t.to(dtypes[4]) for t in lists[1]]])
    assert buf.item() == 0


@OPTION("dtype", [torch.int32, F32], ids=["int32", "fp32"])
@OPTION("mix", ["fp16", "fp16-model"])
@OPTION("case", ["bert", "l2"])
def test_lamb_mp_does_nothing_where_the_flag_is_set(case, mix, dtype):
    lists = make([5, 0, 7], [FLOATS[kind] for kind in MIXES[mix]])
    before, buf = copies(lists), flag(1, dtype)
    call_lamb_mp(lists, case, 1.0, 2.0, 1, buf)
    assert_same(lists, before)
    assert buf.tolist() == [1]


def test_lamb_mp_stops_at_a_param_that_is_not_finite():
    lists = make([5, 7], [F32] * 4)
    lists[1][1][3] = float("inf")
    before, buf = copies(lists), flag()
    call_lamb_mp(lists, "bert", 1.0, 2.0, 1, buf)
    assert buf.tolist() == [1]
    assert_same(lists, before)


def test_lamb_mp_stops_at_an_update_that_is_not_finite():
    """Moments and updates are there by then; params keep their values."""
    lists = make([5, 7], [F32] * 4)
    lists[0][1][3] = float("inf")
    before, buf = copies(lists), flag()
    call_lamb_mp(lists, "bert", 1.0, 2.0, 1, buf)
    assert buf.tolist() == [1]
    assert_same([lists[1]], [before[1]])
    assert not torch.equal(lists[2][0], before[2][0])


# --- the two stages ---------------------------------------------------------------------------------------------------


@OPTION("norm", NORMS)
@OPTION("kinds", [("fp32",) * 3, ("fp16", "fp32", "fp32"), ("fp16", "fp16", "fp32"), ("bf16",) * 3], ids="-".join)
def test_lamb_stages(device, kinds, norm):
    """Decay is a number for each tensor; the step is that of before."""
    of_grads, largest = NORMS[norm]
    g, p, u = (FLOATS[kind] for kind in kinds)
    lists = make(SIZES["empties"], [g, p, p, p, u], device)
    n = len(lists[0])
    decay = torch.arange(n, dtype=F32, device=device) / 10
    want = []
    for row, wd in zip(wide(lists), decay.double(), strict=True):
        scaled = row[0] / max(of_grads / largest, 1.0)
        want.append(direction(scaled, *row[1:4], 3, True, wd, 1 - BETA1, 1))
    before = copies(lists[:2])
    norm = torch.tensor([of_grads], device=device)
    amp_C.multi_tensor_lamb_stage1_cuda(
        65536, flag(1, device=device), lists, decay, 2, BETA1, BETA2, EPS, norm, largest
    )
    assert_lists(lists[4], [w[0] for w in want])
    assert_lists(lists[2], [w[1] for w in want])
    assert_lists(lists[3], [w[2] for w in want])
    assert_same(lists[:2], before)

    params, updates = lists[1], lists[4]
    norms = [torch.stack([t.double().norm() for t in ts]).float() for ts in (params, updates)]
    norms[0][-1] = 0
    for wd, nvlamb in ((0.0, False), (0.0, True), (0.1, None)):
        (stepped,) = copies([params])
        rows = zip(*wide([params, updates]), strict=True)
        new = [apply(*row, wd, nvlamb) for row in zip(*rows, *(x.double() for x in norms), strict=True)]
        amp_C.multi_tensor_lamb_stage2_cuda(65536, flag(1, device=device), [stepped, updates], *norms, LR, wd, nvlamb)
        assert_lists(stepped, new)


# --- LARS -------------------------------------------------------------------------------------------------------------


def lars(g, w, b, of_g, of_w, trust_coefficient, eps, wd, momentum, nesterov, is_skipped):
    trust = 1.0
    if of_w > 0 and of_g > 0 and not is_skipped:
        trust = trust_coefficient * of_w / (of_g + of_w * wd + eps)
    move = LR * trust * (g + wd * w)
    b = momentum * b - move
    return w + (momentum * b - move if nesterov else b), b


LARS_KINDS = {
    "fp32": ("fp32",) * 3,
    "fp16": ("fp16",) * 3,
    "bf16": ("bf16",) * 3,
    "copy": ("fp16", "fp32", "fp32", "fp16"),
}
# dampening, nesterov, first_run, wd_after_momentum, scale: all but nesterov have no part in it.
IGNORED = (0.3, None, True, True, 7.0)


def call_lars(lists, norms, nesterov, is_skipped, buf):
    dampening, _, *rest = IGNORED
    args = (LR, 0.01, 1e-3, 0.1, 0.9, dampening, nesterov, *rest, is_skipped)
    amp_C.multi_tensor_lars(8192, buf, lists, *norms, *args)


@OPTION("is_skipped", [False, True], ids=["adapted", "skipped"])
@OPTION("nesterov", [False, True], ids=["momentum", "nesterov"])
@OPTION("kinds", LARS_KINDS)
def test_lars(device, kinds, nesterov, is_skipped):
    dtypes = [FLOATS[kind] for kind in LARS_KINDS[kinds]]
    lists = [randn(SIZES["empties"], kind, seed=i, device=device) for i, kind in enumerate(dtypes)]
    lists[1][1].zero_()
    norms = [torch.stack([t.double().norm() for t in ts]).float() for ts in lists[:2]]
    grads = copies(lists[:1])
    rule = (0.01, 1e-3, 0.1, 0.9, nesterov, is_skipped)
    rows = zip(wide(lists), *(x.double() for x in norms), strict=True)
    want = [lars(*row[:3], of_g, of_w, *rule) for row, of_g, of_w in rows]
    call_lars(lists, norms, nesterov, is_skipped, flag(device=device))
    assert_lists(lists[1], [w for w, _ in want])
    assert_lists(lists[2], [b for _, b in want])
    assert_same(lists[:1], grads)
    if len(lists) == 4:
        assert_same([lists[3]], [[t.half() for t in lists[1]]])


def test_lars_does_nothing_where_the_flag_is_set():
    lists = [randn([5, 0], F32, seed=i) for i in range(4)]
    before = copies(lists)
    call_lars(lists, [torch.ones(2)] * 2, False, False, flag(1))
    assert_same(lists, before)


# --- layouts ----------------------------------------------------------------------------------------------------------


def test_memory_formats_go_by_index():
    shapes = [(2, 3, 4, 4), (2, 3, 4, 4), (5, 4)]
    formats = [torch.channels_last, torch.contiguous_format]
    lists = [randn(shapes, kind, seed=i) for i, kind in enumerate([torch.float16, F32, F32, F32, torch.float16])]
    lists[3] = [t.abs() for t in lists[3]]
    for i, tensors in enumerate(lists):
        for k in (0, 1):
            tensors[k] = tensors[k].contiguous(memory_format=formats[(i + k) % 2])
        tensors[2] = tensors[2].t().contiguous().t() if i % 2 else tensors[2]
    rule = {**CASES["l2"], "norm": 1.0, "largest": 2.0, "factor": FACTOR}
    want = [lamb(row, torch.float16, 3, **rule) for row in wide(lists)]
    call_lamb_mp(lists, "l2", 1.0, 2.0, 3, flag())
    assert_lamb(lists[:4], want)
    assert_lists(lists[4], [w[1] for w in want])
