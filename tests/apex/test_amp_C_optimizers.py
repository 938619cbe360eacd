"""amp_C's Adam, SGD, Adagrad and NovoGrad against their formulas in fp64."""

import amp_C
import pytest
import torch
from apex.multi_tensor_apply import multi_tensor_applier
from apex.optimizers import FusedAdam
from kernel_cases import DEVICES, FLOATS, SIZES, assert_lists, assert_same, copies, flag, randn, wide

OPTION = pytest.mark.parametrize


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def make(sizes, kinds, device="cpu", positive=()):
    """Lists of these types; those whose place is in ``positive`` without negative numbers."""
    lists = [randn(sizes, kind, seed=i, device=device) for i, kind in enumerate(kinds)]
    for i in positive:
        lists[i] = [t.abs() for t in lists[i]]
    return lists


# --- Adam -------------------------------------------------------------------------------------------------------------


def adam(g, p, m, v, lr, beta1, beta2, eps, step, mode, bias_correction, wd):
    if mode == 0:
        g = g + wd * p
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g**2
    c1, c2 = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1, 1)
    u = (m / c1) / ((v / c2).sqrt() + eps)
    return p - lr * (u + wd * p if mode == 1 else u), m, v


ADAM = (0.05, 0.9, 0.99, 1e-3)
F32 = torch.float32


@OPTION("sizes", SIZES)
@OPTION("kind", FLOATS)
@OPTION("bias_correction", [0, 1], ids=["no-correction", "correction"])
@OPTION("mode", [0, 1], ids=["l2", "decoupled"])
def test_adam(device, mode, bias_correction, kind, sizes):
    """For many steps, whatever the flag says; gradients stay."""
    lists = make(SIZES[sizes], [FLOATS[kind], FLOATS[kind], F32, F32], device, positive=[3])
    grads = copies(lists[:1])
    for step in (1, 2, 7):
        want = [adam(*row, *ADAM, step, mode, bias_correction, 0.1) for row in wide(lists)]
        amp_C.multi_tensor_adam(65536, flag(1, device=device), lists, *ADAM, step, mode, bias_correction, 0.1)
        for got, values in zip(lists[1:], zip(*want, strict=True), strict=True):
            assert_lists(got, values)
    assert_same(lists[:1], grads)


@OPTION("weight_decay", [0.0, 0.1])
@OPTION("mode", [0, 1], ids=["Adam", "AdamW"])
def test_adam_through_the_applier_is_torch_and_fused_adam(mode, weight_decay):
    start = randn([(40, 30), (30,), (1,)])
    options = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": weight_decay}
    theirs, ours = ([torch.nn.Parameter(t.clone()) for t in start] for _ in range(2))
    (p,) = copies([start])
    m, v = ([torch.zeros_like(t) for t in p] for _ in range(2))
    their = (torch.optim.AdamW if mode else torch.optim.Adam)(theirs, foreach=False, **options)
    our = FusedAdam(ours, adam_w_mode=bool(mode), **options)
    for step in range(1, 6):
        g = randn([(40, 30), (30,), (1,)], seed=step)
        for params in (theirs, ours):
            for q, grad in zip(params, g, strict=True):
                q.grad = grad.clone()
        their.step()
        our.step()
        multi_tensor_applier(
            amp_C.multi_tensor_adam, flag(), [g, p, m, v], 0.01, 0.9, 0.99, 1e-8, step, mode, 1, weight_decay
        )
        assert_same([p], [[q.detach() for q in ours]])
        assert_lists(p, [q.detach().double() for q in theirs])


def capturable(step=3, lr=0.05, inv_scale=0.25, device="cpu"):
    """lr, betas, eps, step, mode, bias correction, weight decay, inverse scale: numbers of the device are tensors."""
    count = torch.tensor([step], dtype=torch.int32, device=device)
    rate, factor = torch.tensor([lr], device=device), torch.tensor([inv_scale], device=device)
    return rate, 0.9, 0.99, 1e-3, count, 1, 1, 0.1, factor


@OPTION("sizes", ["odd", "empties"])
@OPTION("master", [False, True], ids=["capturable", "master"])
@OPTION("kind", FLOATS)
def test_adam_capturable(device, kind, master, sizes):
    dtype = FLOATS[kind]
    lists = make(SIZES[sizes], [dtype, dtype, F32, F32] + [F32] * master, device, positive=[3])
    rows = wide(lists)
    op = amp_C.multi_tensor_adam_capturable_master if master else amp_C.multi_tensor_adam_capturable
    op(65536, flag(device=device), lists, *capturable(device=device))
    want = [adam(row[0] * 0.25, row[4] if master else row[1], row[2], row[3], *ADAM, 3, 1, 1, 0.1) for row in rows]
    for got, values in zip(lists[1:4], zip(*want, strict=True), strict=True):
        assert_lists(got, values)
    assert_lists(lists[0], [row[0] * 0.25 for row in rows])
    if master:
        assert_lists(lists[4], [w[0] for w in want])
        assert_same([lists[1]], [[t.to(dtype) for t in lists[4]]])


# --- the flag of those that read it -----------------------------------------------------------------------------------


SGD = (0.1, 0.9, 0.3, 0.05, False, False, False, 0.5)
READERS = {
    "sgd": (amp_C.multi_tensor_sgd, 3, SGD),
    "sgd-copies": (amp_C.multi_tensor_sgd, 4, SGD),
    "adam-capturable": (amp_C.multi_tensor_adam_capturable, 4, capturable()),
    "adam-capturable-master": (amp_C.multi_tensor_adam_capturable_master, 5, capturable()),
}


@OPTION("name", READERS)
@OPTION("dtype", [torch.int32, torch.float32], ids=["int32", "fp32"])
def test_a_flag_that_is_set_lets_nothing_happen(dtype, name):
    op, depth, args = READERS[name]
    lists = make([5, 0, 33], [torch.float16] + [F32] * (depth - 1), positive=[3] if depth > 3 else [])
    before = copies(lists)
    buf = flag(1, dtype)
    op(65536, buf, lists, *args)
    assert_same(lists, before)
    assert buf.tolist() == [1]
    op(65536, flag(0, dtype), lists, *args)
    assert not torch.equal(lists[1][0], before[1][0])


# --- SGD --------------------------------------------------------------------------------------------------------------


def sgd(g, w, b, wd, momentum, dampening, lr, nesterov, first_run, wd_after_momentum, scale):
    g = g * scale
    if not wd_after_momentum:
        g = g + wd * w
    if momentum != 0:
        b = g if first_run else momentum * b + (1 - dampening) * g
        g = g + momentum * b if nesterov else b
    if wd_after_momentum:
        g = g + wd * w
    return w - lr * g, b


COMBINATIONS = {
    "half": ("fp16", "fp16"),
    "float": ("fp32", "fp32"),
    "bf16": ("bf16", "bf16"),
    "half-masters": ("fp16", "fp32", "fp16"),
    "float-masters": ("fp32", "fp32", "fp16"),
    "bf16-masters": ("bf16", "fp32", "bf16"),
}


@OPTION("wd_after_momentum", [False, True], ids=["wd-before", "wd-after"])
@OPTION("first_run", [False, True], ids=["later", "first"])
@OPTION(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)], ids=["plain", "momentum", "nesterov"])
@OPTION("kinds", COMBINATIONS)
def test_sgd(kinds, momentum, nesterov, first_run, wd_after_momentum):
    g, w, *copy = (FLOATS[kind] for kind in COMBINATIONS[kinds])
    for wd, sizes in ((0.0, SIZES["odd"]), (0.1, SIZES["empties"])):
        lists = make(sizes, [g, w, w, *copy])
        args = (wd, momentum, 0.3, 0.05, nesterov, first_run, wd_after_momentum, 0.5)
        want = [sgd(*row[:3], *args) for row in wide(lists)]
        grads = copies(lists[:1])
        amp_C.multi_tensor_sgd(65536, flag(), lists, *args)
        assert_lists(lists[1], [new for new, _ in want])
        assert_lists(lists[2], [b for _, b in want])
        assert_same(lists[:1], grads)
        if copy:
            assert_same([lists[3]], [[t.to(copy[0]) for t in lists[1]]])


# --- Adagrad ----------------------------------------------------------------------------------------------------------


@OPTION("sizes", SIZES)
@OPTION("kind", FLOATS)
@OPTION("mode", [0, 1], ids=["l2", "decoupled"])
def test_adagrad(device, mode, kind, sizes):
    lists = make(SIZES[sizes], [FLOATS[kind]] * 3, device, positive=[2])
    want = []
    for g, p, h in wide(lists):
        g = g + 0.1 * p if mode == 0 else g
        h = h + g**2
        u = g / (h.sqrt() + 1e-3)
        want.append((p - 0.05 * (u + 0.1 * p if mode == 1 else u), h))
    amp_C.multi_tensor_adagrad(65536, flag(1, device=device), lists, 0.05, 1e-3, mode, 0.1)
    assert_lists(lists[1], [p for p, _ in want])
    assert_lists(lists[2], [h for _, h in want])


# --- NovoGrad ---------------------------------------------------------------------------------------------------------


def novograd(g, p, m, n, lr, beta1, beta2, eps, step, bias_correction, wd, grad_averaging, moment_mode, norm_type):
    if norm_type == 2:
        n = (beta2 * n**2 + (1 - beta2) * g.norm() ** 2).sqrt()
    else:
        n = beta2 * n + (1 - beta2) * (g.abs().max() if g.numel() else 0.0)
    c1, c2 = (1 - beta1**step, (1 - beta2**step) ** 0.5) if bias_correction else (1, 1)
    beta3 = 1 - beta1 if grad_averaging else 1
    d = n / c2 + eps
    if moment_mode == 0:
        m = beta1 * m + beta3 * (g / d + wd * p)
        return p - lr * m / c1, m, n
    m = beta1 * m + beta3 * g
    return p - lr * ((m / c1) / d + wd * p), m, n


@OPTION("norm_type", [0, 2], ids=["inf", "l2"])
@OPTION("moment_mode", [0, 1], ids=["reg-inside", "reg-outside"])
@OPTION("grad_averaging", [0, 1], ids=["beta3-1", "averaging"])
@OPTION("bias_correction", [0, 1], ids=["no-correction", "correction"])
@OPTION("kind", FLOATS)
def test_novograd(kind, bias_correction, grad_averaging, moment_mode, norm_type):
    """Norms are blended at the first step too: the caller chose what is in them."""
    lists = make(SIZES["empties"], [FLOATS[kind]] * 3)
    norms = torch.rand(len(lists[0])) + 0.5
    grads = copies(lists[:1])
    for step in (1, 2):
        args = (0.05, 0.9, 0.95, 1e-3, step, bias_correction, 0.1, grad_averaging, moment_mode, norm_type)
        want = [novograd(*row, n, *args) for row, n in zip(wide(lists), norms.double(), strict=True)]
        amp_C.multi_tensor_novograd(65536, flag(), lists, norms, *args)
        assert_lists(lists[1], [p for p, _, _ in want])
        assert_lists(lists[2], [m for _, m, _ in want])
        assert_lists(norms, [n for _, _, n in want])
    assert_same(lists[:1], grads)


@OPTION("norm_type", [0, 2], ids=["inf", "l2"])
@OPTION("bad", [float("inf"), float("nan")], ids=str)
def test_novograd_raises_the_flag_and_goes_on(bad, norm_type):
    """nan counts in the largest element too; tensors without it are stepped whatever the flag says."""
    lists = make([5, 7], [F32] * 3)
    lists[0][1][3] = bad
    norms, buf, before = torch.ones(2), flag(), copies(lists)
    args = (0.05, 0.9, 0.95, 1e-3, 1, 1, 0.1, 1, 1, norm_type)
    for _ in range(2):
        amp_C.multi_tensor_novograd(65536, buf, lists, norms, *args)
        assert buf.tolist() == [1]
    assert norms[0].isfinite()
    assert not norms[1].isfinite()
    assert norms[1].isnan() == torch.tensor(bad).isnan()
    assert lists[1][0].isfinite().all()
    assert not torch.equal(lists[1][0], before[1][0])


# --- types and layouts in any mix -------------------------------------------------------------------------------------


def test_mixed_lists_and_memory_formats_go_by_index():
    """apex took the type from the first tensor and went through memory."""
    shapes = [(2, 3, 4, 4), (6,), (2, 3, 4, 4), (5, 2), (2, 3, 4, 4)]
    kinds = [F32, torch.bfloat16, torch.float16, F32, F32]
    g, p = ([t.to(k) for t, k in zip(randn(shapes, seed=s), kinds, strict=True)] for s in (0, 1))
    m, v = randn(shapes, seed=2), [t.abs() for t in randn(shapes, seed=3)]
    g[0] = g[0].to(memory_format=torch.channels_last)
    p[2] = p[2].to(memory_format=torch.channels_last)
    g[3], p[3] = g[3].t().contiguous().t(), randn([(5, 4)])[0][:, ::2]
    p[4] = p[4].to(memory_format=torch.channels_last)
    v[4] = v[4].to(memory_format=torch.channels_last)
    lists = [g, p, m, v]
    want = [adam(*row, *ADAM, 2, 1, 1, 0.1) for row in wide(lists)]
    amp_C.multi_tensor_adam(65536, flag(), lists, *ADAM, 2, 1, 1, 0.1)
    for got, values in zip(lists[1:], zip(*want, strict=True), strict=True):
        assert_lists(got, values)


def test_parameters_that_require_grad_are_stepped_in_grad_mode():
    p = torch.nn.Parameter(torch.ones(3))
    lists = [[torch.ones(3)], [p], [torch.zeros(3)], [torch.zeros(3)]]
    version = p._version
    amp_C.multi_tensor_adam(65536, flag(), lists, 0.5, 0.0, 0.0, 0.0, 1, 1, 0, 0.0)
    assert p.tolist() == [0.5] * 3
    assert p.is_leaf
    assert p._version > version
