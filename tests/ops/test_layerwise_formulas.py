"""The optimizers with norms of tensors on every backend: the formulas in fp64, and the norms. test_optimizer_steps.py
has what all optimizers share."""

import itertools

import pytest
import torch
from backends import CHUNKS, NON_FINITE, short
from optimizer_calls import LAMB, LOW, NOVOGRAD, bits, make_call, on_kernels

# --- the formulas in fp64 ---------------------------------------------------------------------------------------------


def combinations_of(*flags):
    return [dict(zip(flags, values, strict=True)) for values in itertools.product((False, True), repeat=len(flags))]


def flag_id(flags):
    return "-".join(name if value else f"no_{name}" for name, value in flags.items())


NOVOGRADS = combinations_of("bias_correction", "grad_averaging", "reg_inside_moment", "inf_norm", "init_zero")


_OF_LAMB = {"beta1": 0.0, "beta2": 0.0, "eps": 0.0, "bias_correction": False, "weight_decay": 0.0, "use_nvlamb": True}
EXACT = {"lamb": (LAMB, _OF_LAMB, 1)}
EXACT |= {f"novograd-{flag_id(flags)}": (NOVOGRAD, flags, 2) for flags in NOVOGRADS[::3]}


@on_kernels
@pytest.mark.parametrize(("optimizer", "options", "times"), EXACT.values(), ids=EXACT.keys())
def test_exact_norms_give_exact_results(backend, reference, optimizer, options, times):
    """Small whole numbers sum up exactly in any order, and LAMB's u is made of 1 and -1: no bit may differ."""
    call = make_call(backend, optimizer, [1000, 17, 0, 4099], **options)
    for t in call["grads"] + call["params"]:
        t.mul_(4).round_()
    for g in call["grads"] if optimizer is LAMB else ():
        g[g == 0] = 1
    expected = call.expected(lr=0.3, times=times)
    call.run(backend, lr=0.3, times=times).assert_same(expected)


# --- lamb -------------------------------------------------------------------------------------------------------------


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
def test_non_finite_of_lamb_stays_in_its_tensor(backend, adam_w_mode):
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


# --- novograd ---------------------------------------------------------------------------------------------------------


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


def test_novograd_of_gradients_of_zero(backend):
    """d is eps: a first step of nothing, no 0 / 0, and the weights decay."""
    call = make_call(backend, NOVOGRAD, [700, 5], counts=[0])
    for t in call["grads"] + call["exp_avgs"]:
        t.zero_()
    before = call.clone()
    call.run(backend, lr=0.5)
    for n, p, w in zip(call["exp_avg_sqs"], call["params"], before["params"], strict=True):
        assert n == 0
        torch.testing.assert_close(p, w - 0.5 * 0.1 * w)
