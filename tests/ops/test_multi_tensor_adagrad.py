"""multi_tensor_adagrad on every backend: what torch.optim computes, and the decoupled form. test_optimizer_steps.py has
what all optimizers share."""

import pytest
import torch
from optimizer_calls import ADAGRAD, make_call

SHAPES = [(33,), (4, 5), (700,), ()]


@pytest.mark.parametrize("maximize", [False, True], ids=["minimize", "maximize"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_against_torch(backend, weight_decay, maximize):
    call = make_call(backend, ADAGRAD, SHAPES, counts=[0], weight_decay=weight_decay, maximize=maximize)
    for h in call["sums"]:
        h.fill_(0.5)
    params = [p.clone().requires_grad_() for p in call["params"]]
    shared = {"weight_decay": weight_decay, "maximize": maximize, "initial_accumulator_value": 0.5}
    theirs = torch.optim.Adagrad(params, lr=0.01, eps=1e-10, foreach=False, **shared)
    for step in range(4):
        for i, p in enumerate(params):
            p.grad = backend.randn([p.shape], seed=100 + 10 * step + i)[0]
            call["grads"][i].copy_(p.grad * 8)
        theirs.step()
        call.run(backend, inv_scale=0.125, lr=0.01)
    for i, p in enumerate(params):
        torch.testing.assert_close(call["params"][i], p.detach())
        torch.testing.assert_close(call["sums"][i], theirs.state[p]["sum"])
        assert call["steps"][i] == 4


def test_decoupled_weight_decay(backend):
    call = make_call(backend, ADAGRAD, SHAPES, adagrad_w_mode=True, weight_decay=0.2)
    wide = {name: [t.double() for t in tensors] for name, tensors in call.lists.items()}
    call.run(backend, inv_scale=0.5, lr=0.01)
    for i, (g, w, h) in enumerate(zip(wide["grads"], wide["params"], wide["sums"], strict=True)):
        h = h + (g * 0.5) ** 2
        torch.testing.assert_close(call["sums"][i], h.float())
        want = w - 0.01 * (g * 0.5 / (h.sqrt() + 1e-10) + 0.2 * w)
        torch.testing.assert_close(call["params"][i], want.float())
