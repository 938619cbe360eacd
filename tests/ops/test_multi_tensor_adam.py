"""multi_tensor_adam on every backend: what torch.optim computes, and the formulas themselves. test_optimizer_steps.py
has what all optimizers share."""

import pytest
import torch
from optimizer_calls import ADAM, AMSGRAD, make_call, on_kernels

SHAPES = [(33,), (4, 5), (700,), ()]


def with_torch(backend, optimizer, torch_optimizer, steps=4, **options):
    """Parameters after some steps of the op and of torch's optimizer, from zero states on."""
    call = make_call(backend, optimizer, SHAPES, counts=[0], **options)
    for name in optimizer.states:
        for t in call[name]:
            t.zero_()
    params = [p.clone().requires_grad_() for p in call["params"]]
    theirs = torch_optimizer(params)
    for step in range(steps):
        for i, p in enumerate(params):
            p.grad = backend.randn([p.shape], seed=100 + 10 * step + i)[0]
            call["grads"][i].copy_(p.grad * 8)
        theirs.step()
        call.run(backend, inv_scale=0.125, lr=0.01)
    return call, params, theirs


@pytest.mark.parametrize("maximize", [False, True], ids=["minimize", "maximize"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("adam_w_mode", [False, True], ids=["adam", "adamw"])
@pytest.mark.parametrize("optimizer", [ADAM, AMSGRAD], ids=lambda o: o.name)
def test_against_torch(backend, optimizer, adam_w_mode, weight_decay, maximize):
    def build(params):
        kind = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
        amsgrad = optimizer is AMSGRAD
        shared = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": weight_decay, "amsgrad": amsgrad}
        return kind(params, maximize=maximize, foreach=False, **shared)

    options = {"adam_w_mode": adam_w_mode, "weight_decay": weight_decay, "maximize": maximize}
    call, params, theirs = with_torch(backend, optimizer, build, **options)
    for i, p in enumerate(params):
        torch.testing.assert_close(call["params"][i], p.detach())
        state = theirs.state[p]
        assert call["steps"][i] == state["step"]
        for ours, name in zip(optimizer.states, ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), strict=False):
            torch.testing.assert_close(call[ours][i], state[name])


@pytest.mark.parametrize("adam_w_mode", [False, True], ids=["adam", "adamw"])
def test_without_bias_correction(backend, adam_w_mode):
    call = make_call(backend, ADAM, SHAPES, bias_correction=False, adam_w_mode=adam_w_mode)
    wide = {name: [t.double() for t in tensors] for name, tensors in call.lists.items()}
    call.run(backend, inv_scale=0.5, lr=0.01)
    for i, (g, w, m, v) in enumerate(
        zip(*(wide[name] for name in ("grads", "params", "exp_avgs", "exp_avg_sqs")), strict=True)
    ):
        g = g * 0.5 + (0 if adam_w_mode else 0.1 * w)
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        want = w - 0.01 * (m / (v.sqrt() + 1e-8) + (0.1 * w if adam_w_mode else 0))
        torch.testing.assert_close(call["params"][i], want.float())


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


@on_kernels
def test_the_first_count_of_a_call_is_minus_one(backend, reference):
    """Nothing counts so, but what a checkpoint holds is taken as it is."""
    call = make_call(backend, ADAM, [65, 3], counts=[-1], bias_correction=False)
    expected = call.expected()
    call.run(backend).assert_same(expected)
