"""multi_tensor_lion by hand; beside the reference with the other element-wise optimizers: test_optimizer_steps."""

import torch
from optimizer_calls import LION, make_call


def test_a_step_by_hand(backend):
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


def test_decay_is_of_the_weight_before(backend):
    call = make_call(backend, LION, [3], weight_decay=0.5)
    call["grads"][0].copy_(torch.tensor([1.0, -1.0, 0.0]))
    call["params"][0].copy_(torch.tensor([2.0, 2.0, 2.0]))
    call["exp_avgs"][0].zero_()
    call.run(backend, inv_scale=1.0, lr=0.25)
    assert call["params"][0].tolist() == [1.5, 2.0, 1.75]
