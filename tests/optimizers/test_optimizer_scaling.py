"""What amp leaves on an optimizer for a step, how many ops a step calls, and that nothing waits for the device."""

from __future__ import annotations

import pytest
import torch
from host_reads import OpCalls
from kit import assert_same, backward, params_of, snapshot, with_plans
from optimizer_cases import BY_NAME, MODES, ONE_CALL, give, gradients, make, parameters, run
from tape import Tape
from torch import nn

from ampctx._errors import AmpValueError
from ampctx.amp import AmpSession
from ampctx.optimizers import FusedSGD

FLAGS = {
    "2": (torch.tensor([2.0]), True),
    "int32": (torch.tensor([1], dtype=torch.int32), True),
    "int64": (torch.tensor(3), True),
    "bool": (torch.tensor(True), True),
    "number": (1, True),
    "0-int32": (torch.zeros(1, dtype=torch.int32), False),
    "0-number": (0, False),
}


# --- found_inf and grad_scale -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("flag", "skips"), FLAGS.values(), ids=FLAGS)
def test_every_flag_that_is_not_0_skips(flag, skips):
    optimizer, plain = make("adam", "fp32"), make("adam", "fp32")
    run(optimizer, 1)
    run(plain, 1 if skips else 2)
    optimizer.found_inf = flag
    run(optimizer, 1, first=1)
    assert_same(snapshot(optimizer), snapshot(plain))


def test_a_skipped_first_step_leaves_the_start_of_momentum_to_the_next():
    optimizer, plain = make("sgd", "fp32"), make("sgd", "fp32")
    optimizer.found_inf = torch.tensor(1.0)
    run(optimizer, 1)
    del optimizer.found_inf
    run(optimizer, 2)
    run(plain, 2)
    assert_same(snapshot(optimizer), snapshot(plain))


@pytest.mark.parametrize("scale", [torch.tensor(64.0), torch.tensor([64.0], dtype=torch.float64), 64], ids=str)
@pytest.mark.parametrize("name", BY_NAME)
def test_grad_scale_divides_gradients_for_the_step_and_for_who_reads_them_after_it(name, scale):
    optimizer, plain = BY_NAME[name](parameters()), BY_NAME[name](parameters())
    optimizer.grad_scale = scale
    for step in range(3):
        grads = gradients(parameters(), step)
        scaled = [g * 64 for g in grads]
        give(params_of(optimizer), scaled)
        give(params_of(plain), grads)
        optimizer.step()
        plain.step()
        assert_same(scaled, grads)
    assert_same(snapshot(optimizer), snapshot(plain))


@pytest.mark.parametrize("name", ["found_inf", "grad_scale"])
def test_what_amp_leaves_must_have_one_element(name):
    optimizer = make("adam", "fp32")
    run(optimizer, 1)
    before = snapshot(optimizer)
    setattr(optimizer, name, torch.ones(2))
    with pytest.raises(AmpValueError, match=f"Tensor {name} must be 1-element: {name} has 2 elements"):
        optimizer.step()
    assert_same(before, snapshot(optimizer))


# --- op calls and host reads ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ONE_CALL)
def test_one_op_call_for_each_bucket(name):
    fp32, fp16, bf16 = (parameters(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16))
    optimizer = BY_NAME[name]([{"params": fp32 + fp16}, {"params": bf16}])
    run(optimizer, 1)
    with OpCalls() as calls:
        run(optimizer, 1)
    norms = {"multi_tensor_unscale_l2norm": 3} if name == "lamb" else {}
    assert calls.of == {f"multi_tensor_{name}": 3, **norms}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", BY_NAME)
def test_no_host_read_in_a_step(name, mode):
    optimizer = make(name, mode)
    # Goes to plain torch, where the reads of an op's reference would be seen.
    strided = nn.Parameter(torch.randn(8, 3).to(MODES[mode][0])[::2])
    optimizer.add_param_group({"params": [strided], "lr": torch.tensor(0.01)})
    assert not strided.is_contiguous()
    with OpCalls() as calls:
        run(optimizer, 2)
        optimizer.found_inf = torch.tensor(1.0)
        optimizer.grad_scale = torch.tensor([8.0])
        run(optimizer, 2)
        with torch.no_grad():
            strided.add_(1.0)
        optimizer.param_groups[0]["lr"] = torch.tensor([0.5], dtype=torch.float64)
        run(optimizer, 1)
    assert calls.count == 0
    assert calls.on_lists > 0


@pytest.mark.parametrize("name", ["adam", "lamb"])
def test_a_capturable_step_sees_its_lr_change_without_python(name):
    (p,) = parameters(shapes=[(3,)])
    optimizer = BY_NAME[name]([p], capturable=True)
    run(optimizer, 1)
    p.grad = torch.ones(3)
    with Tape() as tape:
        optimizer.step()
    optimizer.param_groups[0]["lr"].zero_()
    before = p.detach().clone()
    tape.replay()
    assert_same([p.detach()], [before])
    assert optimizer.state[p]["step"] == 3
    optimizer.param_groups[0]["lr"].fill_(0.1)
    tape.replay()
    assert not torch.equal(p, before)


@pytest.mark.parametrize("name", BY_NAME)
def test_capturable_is_the_same_arithmetic(name):
    plain, optimizer = BY_NAME[name](parameters()), BY_NAME[name](parameters(), capturable=True)
    lr = optimizer.param_groups[0]["lr"]
    assert (lr.dtype, lr.shape, lr.item()) == (torch.float32, (), pytest.approx(0.01))
    run(optimizer, 3)
    run(plain, 3)
    assert_same(snapshot(optimizer), snapshot(plain))


# --- under amp --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("name", BY_NAME)
@with_plans
def test_a_step_is_one_pass_over_16_bit_gradients(name, level):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer, session = BY_NAME[name](model.parameters()), AmpSession()
    session.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    for step in range(3):
        backward(session, model(torch.randn(8, 4)).float().square().mean(), optimizer)
        with OpCalls() as calls:
            optimizer.step()
        if step:
            # Muon steps two weights of their own shapes by two calls, and the biases by Adam's. NovoGrad has norms, an
            # average and a step.
            expected = {"muon": (2, 2 * 2 + 2), "novograd": (0, 4)}.get(name, (1, 1))
            assert (calls.of[f"multi_tensor_{name}"], calls.on_lists) == expected
            assert calls.count == 0
        optimizer.zero_grad()
    assert all(optimizer.state[p]["step"] == 3 for p in params_of(optimizer))
    assert all("master_param" not in optimizer.state[p] for p in params_of(optimizer))
    session.reset()
    assert all(p.dtype == torch.float32 for p in params_of(optimizer))


@pytest.mark.parametrize("level", ["O0", "O3"])
def test_state_from_before_initialize_stays_in_fp32(level):
    """A model cast to 16 bits takes state along that the optimizer keeps in fp32."""
    p = nn.Parameter(torch.ones(3, dtype=torch.float32 if level == "O3" else torch.float64))
    model = nn.ParameterList([p])
    optimizer, session = FusedSGD([p], lr=0.5, momentum=0.9), AmpSession()
    p.grad = torch.full_like(p, 1.0001)  # no fp16 number
    optimizer.step()
    session.initialize(model, optimizer, opt_level=level, verbosity=0)
    state = optimizer.state[p]["momentum_buffer"]
    assert_same([state], [torch.full((3,), 1.0001)])
    p.grad = torch.zeros_like(p)
    optimizer.step()
    session.reset()
    assert_same([optimizer.state[p]["momentum_buffer"].float()], [torch.full((3,), 1.0001) * 0.9])
