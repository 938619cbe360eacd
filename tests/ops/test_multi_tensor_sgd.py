"""multi_tensor_sgd on every backend: what torch.optim computes, and decay after momentum. test_optimizer_steps.py has
what all optimizers share."""

import pytest
import torch
from optimizer_calls import MOMENTUM, SGD, make_call

SHAPES = [(33,), (4, 5), (700,), ()]
FORMS = {
    "plain": (SGD, {}),
    "momentum": (MOMENTUM, {"dampening": 0.0}),
    "dampening": (MOMENTUM, {"dampening": 0.3}),
    "nesterov": (MOMENTUM, {"dampening": 0.0, "nesterov": True}),
}


@pytest.mark.parametrize("maximize", [False, True], ids=["minimize", "maximize"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(("optimizer", "options"), FORMS.values(), ids=FORMS.keys())
def test_against_torch(backend, optimizer, options, weight_decay, maximize):
    """The first step finds garbage in the momentum buffers and sets them."""
    options = {**options, "weight_decay": weight_decay, "maximize": maximize}
    call = make_call(backend, optimizer, SHAPES, counts=[0], **options)
    for name in optimizer.states:
        for t in call[name]:
            t.fill_(float("nan"))
    params = [p.clone().requires_grad_() for p in call["params"]]
    momentum = call.options["momentum"]
    theirs = torch.optim.SGD(params, lr=0.01, momentum=momentum, foreach=False, **options)
    for step in range(4):
        for i, p in enumerate(params):
            p.grad = backend.randn([p.shape], seed=100 + 10 * step + i)[0]
            call["grads"][i].copy_(p.grad * 8)
        theirs.step()
        call.run(backend, inv_scale=0.125, lr=0.01)
    for i, p in enumerate(params):
        torch.testing.assert_close(call["params"][i], p.detach())
        assert call["steps"][i] == 4
        if momentum:
            torch.testing.assert_close(call["momentum_buffers"][i], theirs.state[p]["momentum_buffer"])


@pytest.mark.parametrize(("optimizer", "options"), FORMS.values(), ids=FORMS.keys())
def test_weight_decay_after_momentum(backend, optimizer, options):
    """The decay goes to what lr multiplies, and not into the buffer."""
    call = make_call(backend, optimizer, SHAPES, wd_after_momentum=True, weight_decay=0.2, counts=[0, 3], **options)
    wide = {name: [t.double() for t in tensors] for name, tensors in call.lists.items()}
    call.run(backend, inv_scale=0.5, lr=0.01)
    dampening, nesterov = call.options["dampening"], call.options["nesterov"]
    for i, (g, w) in enumerate(zip(wide["grads"], wide["params"], strict=True)):
        update = g = g * 0.5
        if optimizer is MOMENTUM:
            buffer = g if i % 2 == 0 else 0.9 * wide["momentum_buffers"][i] + (1 - dampening) * g
            torch.testing.assert_close(call["momentum_buffers"][i], buffer.float())
            update = g + 0.9 * buffer if nesterov else buffer
        torch.testing.assert_close(call["params"][i], (w - 0.01 * (update + 0.2 * w)).float())
