"""multi_tensor_larc on every backend: the formula in fp64, its norms. test_optimizer_steps.py has what all optimizers
share."""

import pytest
import torch
from optimizer_calls import LARC, MANY, make_call, on_kernels


def larc(g, w, lr, options):
    """The gradient afterwards. In fp64; rows of the last dimension are tensors."""
    o = options
    of_g, of_w = g.norm(dim=-1, keepdim=True), w.norm(dim=-1, keepdim=True)
    rate = o["trust_coefficient"] * of_w / (of_g + o["weight_decay"] * of_w + o["eps"])
    if o["clip"]:
        rate = (rate / lr).clamp(max=1)
    decay = -o["weight_decay"] if o["maximize"] else o["weight_decay"]
    return torch.where((of_g > 0) & (of_w > 0), rate * (g + decay * w), g)


@pytest.mark.parametrize("maximize", [False, True], ids=["down", "up"])
@pytest.mark.parametrize("clip", [False, True], ids=["scale", "clip"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("lr", [1e-4, 0.5], ids=["clipped", "below"])
def test_formula(backend, clip, weight_decay, lr, maximize):
    options = {"clip": clip, "weight_decay": weight_decay, "maximize": maximize}
    call = make_call(backend, LARC, [33, 1, 700, 2500, 0], **options)
    before = call.clone()
    call.run(backend, inv_scale=0.125, lr=lr)
    for got, g, w in zip(call["grads"], before["grads"], before["params"], strict=True):
        want = larc(g.double() * 0.125, w.double(), lr, call.options)
        torch.testing.assert_close(got, want.float(), rtol=1e-5, atol=1e-8)
        if clip and lr == 1e-4 and weight_decay == 0:
            assert torch.equal(got, g * 0.125)
    assert all(torch.equal(a, b) for a, b in zip(call["params"], before["params"], strict=True))


def test_many_tensors(backend):
    """Several launches, each with the norms of its own tensors."""
    call = make_call(backend, LARC, [3] * MANY[backend.name])
    g, w = (torch.stack(call[name]).double() for name in ("grads", "params"))
    call.run(backend, inv_scale=0.5, lr=0.1)
    want = larc(g * 0.5, w, 0.1, call.options).float()
    torch.testing.assert_close(torch.stack(call["grads"]), want, rtol=1e-5, atol=1e-8)


def test_tensors_with_a_norm_of_zero_are_unscaled_alone(backend):
    call = make_call(backend, LARC, [700, 5, 33], weight_decay=0.1, grad=torch.float16)
    call["params"][0].zero_()
    call["grads"][1].zero_()
    before = call.clone()
    call.run(backend, inv_scale=0.25)
    assert torch.equal(call["grads"][0], before["grads"][0] * 0.25)
    assert not call["grads"][1].any()
    assert not torch.equal(call["grads"][2], before["grads"][2] * 0.25)


@pytest.mark.parametrize("value", [float("inf"), float("nan")], ids=str)
@on_kernels
def test_non_finite_stays_in_its_tensor(backend, reference, value):
    call = make_call(backend, LARC, [700, 2100, 5])
    call["grads"][1][2050] = value
    expected = call.expected()
    call.run(backend)
    for i in (0, 2):
        torch.testing.assert_close(call["grads"][i], expected["grads"][i])
    assert torch.equal(call["grads"][1].isnan(), expected["grads"][1].isnan())
    assert call["grads"][1][2050].isnan()


@on_kernels
def test_exact_norms_give_exact_gradients(backend, reference):
    """Small whole numbers sum up exactly in any order: with the same norms nothing may differ in one bit."""
    call = make_call(backend, LARC, [1000, 17, 0, 4099])
    for t in call["grads"] + call["params"]:
        t.mul_(4).round_()
    expected = call.expected()
    call.run(backend).assert_same(expected)
