"""multi_tensor_lamb on every backend: the formulas in fp64, its norms. test_optimizer_steps.py has what all optimizers
share."""

import itertools

import pytest
import torch
from backends import short
from optimizer_calls import LAMB, LOW, MANY, bits, make_call, on_kernels

SIZES = [33, 1, 700, 2500]


def lamb(g, w, m, v, step, lr, norm, options):
    """w, m, v after a step. In fp64; rows of the last dimension are tensors, ``step`` counts this one."""
    o = options
    g = g * (o["max_grad_norm"] / norm if 0 < o["max_grad_norm"] < norm else 1)
    decay = o["weight_decay"] * w
    g = g if o["adam_w_mode"] else g + decay
    m = o["beta1"] * m + (1 - o["beta1"] if o["grad_averaging"] else 1) * g
    v = o["beta2"] * v + (1 - o["beta2"]) * g**2
    c1, c2 = (1 - o["beta1"] ** step, 1 - o["beta2"] ** step) if o["bias_correction"] else (1, 1)
    u = (m / c1) / ((v / c2).sqrt() + o["eps"]) + (decay if o["adam_w_mode"] else 0)
    of_w, of_u = w.norm(dim=-1, keepdim=True), u.norm(dim=-1, keepdim=True)
    has_ratio = (of_w > 0) & (of_u > 0) & (o["use_nvlamb"] or o["weight_decay"] != 0)
    return w - lr * torch.where(has_ratio, of_w / of_u, 1.0) * u, m, v


NAMES = ("params", "exp_avgs", "exp_avg_sqs")
FLAGS = ("bias_correction", "adam_w_mode", "grad_averaging", "use_nvlamb")
COMBINATIONS = [dict(zip(FLAGS, values, strict=True)) for values in itertools.product((False, True), repeat=len(FLAGS))]


def flag_id(flags):
    return "-".join(name if value else f"no_{name}" for name, value in flags.items())


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("flags", COMBINATIONS, ids=flag_id)
def test_formula(backend, flags, weight_decay):
    """Three steps from a zero state: the norm below max_grad_norm, above it, and no limit."""
    call = make_call(backend, LAMB, SIZES, counts=[0], weight_decay=weight_decay, **flags)
    for t in call["exp_avgs"] + call["exp_avg_sqs"]:
        t.zero_()
    wide = [[t.double() for t in row] for row in zip(*(call[name] for name in NAMES), strict=True)]
    for step, (norm, limit) in enumerate([(0.5, 1.0), (4.0, 1.0), (4.0, 0.0)], start=1):
        call.options |= {"max_grad_norm": limit, "global_grad_norm": torch.tensor(norm)}
        grads = backend.randn(SIZES, seed=100 + step)
        for g, given in zip(grads, call["grads"], strict=True):
            given.copy_(g * 8)
        call.run(backend, inv_scale=0.125, lr=0.05)
        wide = [lamb(g.double(), *row, step, 0.05, norm, call.options) for g, row in zip(grads, wide, strict=True)]
    for i, row in enumerate(wide):
        for name, want in zip(NAMES, row, strict=True):
            torch.testing.assert_close(call[name][i], want.float(), rtol=1e-5, atol=1e-5, msg=name)


def test_many_tensors(backend):
    """Several launches, each with the norms and the scalars of its own tensors."""
    call = make_call(backend, LAMB, [3] * MANY[backend.name], counts=[0, 1, 2, 7], lr=0.1)
    g, w, m, v = (torch.stack(call[name]).double() for name in ("grads", *NAMES))
    step = torch.stack(call["steps"]).double()[:, None] + 1
    want = lamb(g * 0.5, w, m, v, step, 0.1, 4.0, call.options)
    call.run(backend, inv_scale=0.5, lr=0.1)
    for name, values in zip(NAMES, want, strict=True):
        torch.testing.assert_close(torch.stack(call[name]), values.float(), rtol=1e-4, atol=1e-5, msg=name)
    assert torch.equal(torch.stack(call["steps"])[:, None], step.float())


def test_a_norm_of_zero_gives_no_ratio(backend):
    """Of the weights: the step is lr u. Of u: nothing moves."""
    call = make_call(
        backend, LAMB, [700, 5, 33], counts=[0], weight_decay=0.0, use_nvlamb=True, max_grad_norm=0.0, eps=1e-12
    )
    for t in call["exp_avgs"] + call["exp_avg_sqs"]:
        t.zero_()
    call["params"][0].zero_()
    call["grads"][1].zero_()
    before = call.clone()
    call.run(backend, lr=0.25)
    torch.testing.assert_close(call["params"][0], -0.25 * before["grads"][0].sign())
    assert torch.equal(call["params"][1], before["params"][1])
    w = before["params"][2]
    torch.testing.assert_close(call["params"][2], w - 0.25 * w.norm() / 33**0.5 * before["grads"][2].sign())


@on_kernels
def test_exact_norms_give_exact_weights(backend, reference):
    """Small whole numbers sum up exactly in any order; u is made of 1 and -1. So nothing may differ in one bit."""
    what = {"beta1": 0.0, "beta2": 0.0, "eps": 0.0, "bias_correction": False, "weight_decay": 0.0, "use_nvlamb": True}
    call = make_call(backend, LAMB, [1000, 17, 4099], **what)
    for name, scale in (("grads", 4), ("params", 3)):
        for t in call[name]:
            t.mul_(scale).round_()
    for g in call["grads"]:
        g[g == 0] = 1
    expected = call.expected(lr=0.3)
    call.run(backend, lr=0.3).assert_same(expected)


@on_kernels
@pytest.mark.parametrize("adam_w_mode", [False, True], ids=["l2", "decoupled"])
@pytest.mark.parametrize("state", [torch.float32, *LOW], ids=short)
def test_moments_are_exact(backend, reference, state, adam_w_mode):
    """No norm of a tensor is in them."""
    call = make_call(backend, LAMB, [700, 0, 5], state=state, adam_w_mode=adam_w_mode)
    expected = call.expected()
    call.run(backend).assert_agrees(expected)
    for name in LAMB.states:
        for a, b in zip(call[name], expected[name], strict=True):
            assert torch.equal(bits(a), bits(b)), name


@pytest.mark.parametrize("adam_w_mode", [False, True], ids=["l2", "decoupled"])
def test_non_finite_stays_in_its_tensor(backend, adam_w_mode):
    """An inf that nobody flagged spoils one tensor, through its ratio, and no other."""
    call = make_call(backend, LAMB, [700, 2100, 5], adam_w_mode=adam_w_mode)
    call["grads"][1][2050] = float("inf")
    call.run(backend)
    assert call["params"][1].isnan().any()
    for i in (0, 2):
        assert call["params"][i].isfinite().all()


NORMS = {
    "fp32-cpu": lambda d: torch.tensor(4.0),
    "fp64-cpu": lambda d: torch.tensor([4.0], dtype=torch.float64),
    "on-the-device": lambda d: torch.tensor([4.0], device=d),
    "inf": lambda d: torch.tensor(float("inf"), device=d),
    "nan": lambda d: torch.tensor(float("nan"), device=d),
}


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS.keys())
@on_kernels
def test_global_grad_norm(backend, reference, norm):
    """An infinite norm clips to nothing, one that is no number not at all."""
    norm = norm(backend.device)
    call = make_call(backend, LAMB, [33, 700], max_grad_norm=2.0, global_grad_norm=norm)
    same = make_call(backend, LAMB, [33, 700], max_grad_norm=0.0)
    factor = 2.0 / norm.item() if norm.item() == norm.item() else 1.0
    same.lists["grads"] = [g * factor for g in same["grads"]]
    expected = call.expected()
    call.run(backend).assert_agrees(expected)
    same.run(backend)
    for a, b in zip(call["params"], same["params"], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("limit", [1e300, -1e300, float("inf"), float("nan"), 0.0])
@on_kernels
def test_limits_that_clip_nothing(backend, reference, limit):
    call = make_call(backend, LAMB, [33, 700], max_grad_norm=limit, global_grad_norm=torch.tensor(4.0))
    same = make_call(backend, LAMB, [33, 700], max_grad_norm=8.0, global_grad_norm=torch.tensor(4.0))
    expected = call.expected()
    call.run(backend).assert_agrees(expected)
    call.assert_same(same.run(backend))
