"""The element-wise optimizers on every backend: what torch.optim computes, and the formulas that torch does not have.
test_optimizer_steps.py has what all optimizers share."""

import pytest
import torch
from optimizer_calls import ADAM, AMSGRAD, LION, MUON, make_call, on_kernels

# --- adagrad, adam ----------------------------------------------------------------------------------------------------


def test_the_maximum_keeps_nan(backend):
    call = make_call(backend, AMSGRAD, [9, 3], counts=[4])
    call["max_exp_avg_sqs"][0].fill_(100.0)
    call["max_exp_avg_sqs"][1].fill_(float("nan"))
    call["exp_avg_sqs"][0][4] = float("nan")
    call.run(backend)
    assert call["max_exp_avg_sqs"][0].isnan().tolist() == [i == 4 for i in range(9)]
    assert (call["max_exp_avg_sqs"][0][:4] == 100).all()
    assert call["max_exp_avg_sqs"][1].isnan().all()


@on_kernels
@pytest.mark.parametrize("betas", [(0.0, 0.0), (0.9, 0.999), (0.5, 0.999999)], ids=str)
@pytest.mark.parametrize("taken", [0, 1, 99, 12_345, (1 << 24) - 2])
def test_corrections_at_any_step_count(backend, reference, taken, betas):
    call = make_call(backend, ADAM, [65, 3], counts=[taken], beta1=betas[0], beta2=betas[1])
    expected = call.expected()
    call.run(backend).assert_same(expected)


# --- sgd, lion, muon --------------------------------------------------------------------------------------------------


def test_a_step_of_lion_by_hand(backend):
    call = make_call(backend, LION, [6], weight_decay=0.0)
    g = torch.tensor([0.0, 2.0, -2.0, float("inf"), float("-inf"), float("nan")])
    m = torch.tensor([0.0, -0.1, 0.1, 0.0, 0.0, 0.0])
    for name, values in (("grads", g), ("params", torch.ones(6)), ("exp_avgs", m)):
        call[name][0].copy_(values)
    call.run(backend, inv_scale=1.0, lr=0.25)
    # Of 0 the sign is 0; the small average of before does not turn the sign.
    expected = torch.tensor([1.0, 0.75, 1.25, 0.75, 1.25, float("nan")])
    torch.testing.assert_close(call["params"][0].cpu(), expected, rtol=0, atol=0, equal_nan=True)
    kept = torch.tensor([0.0, -0.099 + 0.02, 0.099 - 0.02, float("inf"), float("-inf"), float("nan")])
    torch.testing.assert_close(call["exp_avgs"][0].cpu(), kept, equal_nan=True)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("momentum", [0.0, 0.3, 0.5, 0.7, 0.95, 1.0])
def test_muon_beside_torchs_lerp(backend, momentum, nesterov):
    """torch rounds once less where its vector loops fuse a product and a sum. The lr of before is not read."""
    call = make_call(backend, MUON, [1000], momentum=momentum, nesterov=nesterov)
    g, m = call["grads"][0].cpu() * 0.5, call["momentum_buffers"][0].cpu().clone()
    m.lerp_(g, 1 - momentum)
    u = g.lerp(m, momentum) if nesterov else m
    call.run(backend, inv_scale=0.5, lr=float("nan"))
    torch.testing.assert_close(call["momentum_buffers"][0].cpu(), m, rtol=3e-7, atol=3e-7)
    torch.testing.assert_close(call["params"][0].cpu(), u, rtol=3e-7, atol=3e-7)
