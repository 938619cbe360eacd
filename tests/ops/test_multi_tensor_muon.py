"""multi_tensor_muon by hand and beside torch.lerp; beside the reference with the other element-wise optimizers:
test_optimizer_steps."""

import pytest
import torch
from optimizer_calls import MUON, make_call


def test_a_step_by_hand(backend):
    call = make_call(backend, MUON, [4], momentum=0.75)
    for name, values in (("grads", [4.0, -4.0, 0.0, 8.0]), ("momentum_buffers", [0.0, 4.0, 8.0, float("inf")])):
        call[name][0].copy_(torch.tensor(values))
    call.run(backend, inv_scale=0.5, lr=float("nan"))
    # m + (g - m) / 4, then g + 3 (m - g) / 4; the params and lr of before are not read.
    assert call["momentum_buffers"][0].tolist()[:3] == [0.5, 2.5, 6.0]
    assert call["params"][0].tolist()[:3] == [0.875, 1.375, 4.5]
    assert not call["params"][0][3].isfinite()
    assert call["steps"][0].item() == 1


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("momentum", [0.0, 0.3, 0.5, 0.7, 0.95, 1.0])
def test_beside_torchs_lerp(backend, momentum, nesterov):
    """torch rounds once less where its vector loops fuse a product and a sum."""
    call = make_call(backend, MUON, [1000], momentum=momentum, nesterov=nesterov)
    g, m = call["grads"][0].cpu(), call["momentum_buffers"][0].cpu().clone()
    m.lerp_(g, 1 - momentum)
    u = g.lerp(m, momentum) if nesterov else m
    call.run(backend, inv_scale=1.0)
    torch.testing.assert_close(call["momentum_buffers"][0].cpu(), m, rtol=3e-7, atol=3e-7)
    torch.testing.assert_close(call["params"][0].cpu(), u, rtol=3e-7, atol=3e-7)
