"""LAMB, with norms of tensors, on every backend: an exact result, and the norms. test_optimizer_steps.py has what all
optimizers share."""

import pytest
import torch
from backends import short
from optimizer_calls import LAMB, LOW, bits, make_call, on_kernels

_OF_ONES = {"beta1": 0.0, "beta2": 0.0, "eps": 0.0, "bias_correction": False, "weight_decay": 0.0, "use_nvlamb": True}


@on_kernels
def test_exact_norms_give_exact_results(backend, reference):
    """Small whole numbers sum up exactly in any order, and u is made of 1 and -1: no bit may differ."""
    call = make_call(backend, LAMB, [1000, 17, 0, 4099], **_OF_ONES)
    for t in call["grads"] + call["params"]:
        t.mul_(4).round_()
    for g in call["grads"]:
        g[g == 0] = 1
    expected = call.expected(lr=0.3)
    call.run(backend, lr=0.3).assert_same(expected)


# --- the norms --------------------------------------------------------------------------------------------------------


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
