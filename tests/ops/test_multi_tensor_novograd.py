"""multi_tensor_novograd on every backend: the formulas in fp64, the norm of a tensor. test_optimizer_steps.py has what
all optimizers share."""

import itertools

import pytest
import torch
from backends import CHUNKS, NON_FINITE
from optimizer_calls import MANY, NOVOGRAD, make_call, on_kernels

SIZES = [33, 1, 700, 2500]


def novograd(g, w, m, n, step, lr, options):
    """w, m, n after a step. In fp64; rows of the last dimension are tensors, ``step`` counts this one."""
    o = options
    if o["inf_norm"]:
        norm = g.abs().amax(dim=-1, keepdim=True)
        blended = o["beta2"] * n + (1 - o["beta2"]) * norm
    else:
        norm = g.norm(dim=-1, keepdim=True)
        blended = (o["beta2"] * n**2 + (1 - o["beta2"]) * norm**2).sqrt()
    n = torch.where((step == 1) & (not o["init_zero"]), norm, blended)
    c1, c2 = (1 - o["beta1"] ** step, 1 - o["beta2"] ** step) if o["bias_correction"] else (1, step**0)
    d = n / c2.sqrt() + o["eps"]
    decay = o["weight_decay"] * w
    g = g / d + decay if o["reg_inside_moment"] else g
    m = o["beta1"] * m + (1 - o["beta1"] if o["grad_averaging"] else 1) * g
    return w - lr * (m / c1 if o["reg_inside_moment"] else m / c1 / d + decay), m, n


NAMES = ("params", "exp_avgs", "exp_avg_sqs")
FLAGS = ("bias_correction", "grad_averaging", "reg_inside_moment", "inf_norm", "init_zero")
COMBINATIONS = [dict(zip(FLAGS, values, strict=True)) for values in itertools.product((False, True), repeat=len(FLAGS))]


def flag_id(flags):
    return "-".join(name if value else f"no_{name}" for name, value in flags.items())


@pytest.mark.full(but=60)
@pytest.mark.parametrize("flags", COMBINATIONS, ids=flag_id)
def test_formula(backend, flags):
    """Three steps from a state of zeros, without weight decay and with it."""
    for weight_decay in (0.0, 0.1):
        call = make_call(backend, NOVOGRAD, SIZES, counts=[0], weight_decay=weight_decay, **flags)
        for t in call["exp_avgs"] + call["exp_avg_sqs"]:
            t.zero_()
        wide = [[t.double() for t in row] for row in zip(*(call[name] for name in NAMES), strict=True)]
        for step in (1, 2, 3):
            grads = backend.randn(SIZES, seed=100 + step)
            for g, given in zip(grads, call["grads"], strict=True):
                given.copy_(g * 8)
            call.run(backend, inv_scale=0.125, lr=0.05)
            count = torch.tensor(float(step), dtype=torch.float64, device=backend.device)
            wide = [novograd(g.double(), *row, count, 0.05, call.options) for g, row in zip(grads, wide, strict=True)]
        for i, row in enumerate(wide):
            for name, want in zip(NAMES, row, strict=True):
                want = want.float().reshape(call[name][i].shape)
                torch.testing.assert_close(call[name][i], want, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.full(but=5)
@pytest.mark.parametrize("inf_norm", [False, True], ids=["l2", "inf"])
def test_many_tensors(backend, inf_norm):
    """Several launches of each kernel, with the norms of their own tensors."""
    call = make_call(backend, NOVOGRAD, [3] * MANY[backend.name], counts=[0, 1, 2, 7], inf_norm=inf_norm)
    g, w, m, n = (torch.stack(call[name]).double() for name in ("grads", *NAMES))
    step = torch.stack(call["steps"]).double()[:, None] + 1
    want = novograd(g * 0.5, w, m, n[:, None], step, 0.1, call.options)
    call.run(backend, inv_scale=0.5, lr=0.1)
    for name, values in zip(NAMES, want, strict=True):
        stacked = torch.stack(call[name])
        torch.testing.assert_close(stacked, values.float().reshape(stacked.shape), rtol=1e-4, atol=1e-5, msg=name)
    assert torch.equal(torch.stack(call["steps"])[:, None], step.float())


@pytest.mark.parametrize("init_zero", [False, True], ids=["norm-first", "zero-first"])
@pytest.mark.parametrize("inf_norm", [False, True], ids=["l2", "inf"])
def test_norms_of_the_first_step(backend, inf_norm, init_zero):
    """What was in exp_avg_sqs counts with init_zero only. Gradients are unscaled, their sign does not matter."""
    sizes = [3, 0, 700, 0]
    what = {"inf_norm": inf_norm, "init_zero": init_zero, "maximize": True}
    call = make_call(backend, NOVOGRAD, sizes, counts=[0, 0, 0, 3], **what)
    norms = [g.abs().max() if inf_norm else g.norm() for g in (call["grads"][0] * 0.5, call["grads"][2] * 0.5)]
    former = [n.clone() for n in call["exp_avg_sqs"]]
    zero = torch.zeros((), device=backend.device)
    call.run(backend, inv_scale=0.5)

    def blended(n, norm):
        return 0.98 * n + 0.02 * norm if inf_norm else (0.98 * n**2 + 0.02 * norm**2).sqrt()

    first = blended if init_zero else lambda n, norm: norm
    want = [first(former[0], norms[0]), first(former[1], zero), first(former[2], norms[1]), blended(former[3], zero)]
    torch.testing.assert_close(call["exp_avg_sqs"], want)


@pytest.mark.parametrize("value", NON_FINITE.values(), ids=NON_FINITE.keys())
@pytest.mark.parametrize("inf_norm", [False, True], ids=["l2", "inf"])
def test_non_finite_gradients_make_their_norm_non_finite(backend, inf_norm, value):
    """At the edges of blocks and shares: nan is larger than all, also than an inf on either side."""
    size = 2 * CHUNKS[-1] + 3
    for at in (0, 511, 512, 2047, 2048, size - 1):
        call = make_call(backend, NOVOGRAD, [size, 5], counts=[0], inf_norm=inf_norm)
        call["grads"][0][[1, 1500, size - 2]] = float("inf") if value != value else 1.0
        call["grads"][0][at] = value
        call.run(backend)
        n = call["exp_avg_sqs"]
        assert n[0].isnan() if value != value else n[0] == float("inf"), at
        assert n[1].isfinite()
        assert call["params"][1].isfinite().all()


def test_gradients_of_zero(backend):
    """d is eps: a first step of nothing, no 0 / 0, and the weights decay."""
    call = make_call(backend, NOVOGRAD, [700, 5], counts=[0])
    for t in call["grads"] + call["exp_avgs"]:
        t.zero_()
    before = call.clone()
    call.run(backend, lr=0.5)
    for n, p, w in zip(call["exp_avg_sqs"], call["params"], before["params"], strict=True):
        assert n == 0
        torch.testing.assert_close(p, w - 0.5 * 0.1 * w)


@on_kernels
@pytest.mark.parametrize("flags", COMBINATIONS[::3], ids=flag_id)
def test_exact_norms_give_exact_weights(backend, reference, flags):
    """Small whole numbers sum up exactly in any order: with the same norms nothing may differ in one bit."""
    call = make_call(backend, NOVOGRAD, [1000, 17, 0, 4099], **flags)
    for g in call["grads"]:
        g.mul_(4).round_()
    expected = call.expected(lr=0.3, times=2)
    call.run(backend, lr=0.3, times=2).assert_same(expected)
