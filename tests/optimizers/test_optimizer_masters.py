"""16-bit parameters: fp32 masters, split masters, and the write backs without masters."""

from __future__ import annotations

import pytest
import torch
from kit import assert_same
from optimizer_cases import BY_NAME, LOW, STATE, give, gradients, masters_of, parameters, run
from torch import nn

from ampctx._errors import AmpValueError
from ampctx.kernels.reference_steps import join
from ampctx.optimizers import FusedAdam, FusedSGD

BF16 = torch.bfloat16


def beside_fp32(ours, optimizer, make, steps):
    """Steps them, and copies in fp32 on the same gradients by another optimizer. Returns the copies."""
    fp32 = [nn.Parameter(p.detach().float()) for p in ours]
    reference = make(fp32)
    for step in range(steps):
        grads = gradients(ours, step)
        give(ours, grads)
        give(fp32, [g.float() for g in grads])
        optimizer.step()
        reference.step()
    return fp32


# --- masters ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", LOW.values(), ids=LOW)
@pytest.mark.parametrize("name", BY_NAME)
def test_masters_are_an_fp32_run_and_weights_are_their_rounding(name, dtype):
    ours = parameters(dtype)
    optimizer = BY_NAME[name](ours, master_weights=True)
    fp32 = beside_fp32(ours, optimizer, BY_NAME[name], 5)
    assert_same([m.detach() for m in masters_of(optimizer)], [p.detach() for p in fp32])
    assert_same([p.detach() for p in ours], [p.detach().to(dtype) for p in fp32])
    assert optimizer.state[ours[0]].keys() == {"step", "master_param"} | STATE[name]


def test_masters_are_made_at_the_first_step():
    (p,) = parameters(BF16, shapes=[(4,)])
    optimizer = FusedSGD([p], lr=0.5, master_weights=True)
    assert masters_of(optimizer) == [None]
    with torch.no_grad():
        p.fill_(2.0)  # as a broadcast of the model does
    p.grad = torch.full_like(p, 2**-8)
    optimizer.step()
    assert masters_of(optimizer)[0].eq(2.0 - 2**-9).all()


def test_fp32_parameters_have_no_master():
    full, half = parameters(shapes=[(3,)]), parameters(torch.float16, shapes=[(3,)])
    optimizer = FusedAdam(full + half, master_weights=True)
    run(optimizer, 1)
    assert "master_param" not in optimizer.state[full[0]]
    assert optimizer.param_groups_master[0]["params"][0] is full[0]
    assert optimizer.param_groups_master[0]["params"][1] is optimizer.state[half[0]]["master_param"]
    assert FusedAdam(full + half).param_groups_master == [{"params": [None, None]}]


# --- the model may change ---------------------------------------------------------------------------------------------


def in_place(p):
    with torch.no_grad():
        p[0] = 7.0


def load_state_dict(p):
    module = nn.Module()
    module.register_parameter("p", p)
    module.load_state_dict({"p": torch.cat([torch.tensor([7.0]), p.detach().float()[1:]])})


@pytest.mark.parametrize("left_out", [False, True])
@pytest.mark.parametrize("change", [in_place, load_state_dict])
def test_masters_follow_a_changed_model_element_by_element(change, left_out):
    """Also where the next step leaves the parameter out."""
    other, p = parameters(BF16, shapes=[(3,), (6,)])
    optimizer = FusedSGD([other, p], lr=1e-4, master_weights=True)
    run(optimizer, 3)
    before = masters_of(optimizer)[1].clone()
    assert not torch.equal(before, p.detach().float())
    change(p)
    for grad in (None, torch.zeros_like(p)) if left_out else (torch.zeros_like(p),):
        p.grad = grad
        optimizer.step()
    expected = before.clone()
    expected[0] = 7.0
    assert_same([masters_of(optimizer)[1]], [expected])
    assert torch.equal(p, expected.to(BF16))


@pytest.mark.parametrize("steps", [1, 3, 99])
def test_a_change_through_data_needs_the_method_and_is_told_by_name(steps, caplog):
    other, p = parameters(BF16, shapes=[(3,), (6,)])
    optimizer = FusedSGD([other, p], lr=1e-4, master_weights=True)
    run(optimizer, steps)
    p.data[1] = 3.0
    run(optimizer, 101 - steps)
    assert p[1] != 3.0, "the docs say that this is not seen: correct them"
    (told,) = caplog.messages
    assert "param_groups[0]['params'][1] was written through .data" in told
    p.data[0] = 7.0
    optimizer.masters_follow_model()
    run(optimizer, 1)
    assert p[0] == 7.0


@pytest.mark.parametrize("kept", [True, "split"])
@pytest.mark.parametrize("name", BY_NAME)
def test_weights_that_replace_those_of_a_parameter_are_stepped(name, kept):
    """As ``p.data = new`` does: the version stays, the memory is another."""
    pairs = [(ours := parameters(BF16), BY_NAME[name](ours, master_weights=kept)) for _ in range(2)]
    for ours, optimizer in pairs:
        run(optimizer, 3)
        for p in ours:
            p.data = torch.full_like(p, 5.0)
        if ours is pairs[1][0]:
            optimizer.masters_follow_model()
        run(optimizer, 2, first=3)
    assert_same(*(masters_of(optimizer) for _, optimizer in pairs))
    assert all(((p - 5).abs() < 0.5).all() for p in pairs[0][0])


@pytest.mark.parametrize("through_data", [False, True], ids=["in-place", "through-data"])
@pytest.mark.parametrize("dtype", LOW.values(), ids=LOW)
def test_kahan_drops_the_compensation_of_a_weight_that_was_changed(dtype, through_data):
    p = nn.Parameter(torch.full((4,), 1000.0, dtype=dtype))
    optimizer = FusedSGD([p], lr=2.0**-8, write_back="kahan")
    p.grad = torch.full_like(p, 13.0)
    optimizer.step()
    left = optimizer.state[p]["compensation"]
    assert (left != 0).all()
    kept = left.clone()
    new = torch.tensor([0.01, 0.0, -0.01], dtype=dtype)
    if through_data:
        p.data[:3] = new
        optimizer.masters_follow_model()
    else:
        with torch.no_grad():
            p[:3] = new
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert_same([p.detach()], [torch.cat([new, p.detach()[3:]])])
    assert_same([left], [torch.cat([torch.zeros(3, dtype=dtype), kept[3:]])])


@pytest.mark.parametrize("dtype", LOW.values(), ids=LOW)
def test_kahan_keeps_every_compensation_that_rounding_leaves(dtype):
    """Ties, powers of two, subnormals, the largest numbers: a checkpoint may not lose any of them."""
    bits = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    p = nn.Parameter(bits[bits.isfinite()].clone())
    optimizer = FusedSGD([p], lr=1.0, write_back="kahan")
    spacing = (p.detach().view(torch.int16) ^ 1).view(dtype).float().sub(p.detach().float()).abs()
    for fraction in (0.5, 0.3, -0.25, -0.5):
        p.grad = (spacing * fraction).to(dtype)
        optimizer.step()
        left, weight = optimizer.state[p]["compensation"], p.detach().clone()
        kept = left.clone()
        optimizer.masters_follow_model()
        assert_same([left], [kept])
        assert left.count_nonzero() > 30_000
        assert_same([p.detach()], [weight])


# --- split ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BY_NAME)
def test_split_is_an_fp32_run_bit_for_bit(name):
    ours = parameters(BF16)
    optimizer = BY_NAME[name](ours, master_weights="split")
    fp32 = beside_fp32(ours, optimizer, BY_NAME[name], 20)
    whole = [join(p.detach(), optimizer.state[p]["remainder"]) for p in ours]
    assert_same(whole, [p.detach() for p in fp32])
    assert_same(masters_of(optimizer), whole)
    assert all(optimizer.state[p]["remainder"].dtype == torch.int16 for p in ours)
    # A rounding to nearest; ties go away from zero.
    ulp = [torch.nextafter(p.detach(), torch.full_like(p, float("inf"))).float() - p.detach().float() for p in ours]
    assert all(bool(((w - p.float()).abs() <= u / 2).all()) for w, p, u in zip(whole, ours, ulp, strict=True))


def test_split_survives_a_weight_set_to_zero():
    (p,) = parameters(BF16, shapes=[(64,)])
    optimizer = FusedSGD([p], lr=1e-3, master_weights="split")
    run(optimizer, 3)
    remainder = optimizer.state[p]["remainder"]
    assert (remainder < 0).any()
    assert (remainder > 0).any()
    with torch.no_grad():
        p.zero_()
        p[1::2] = float("-inf")
    kept = p.detach().clone()
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert_same([p.detach()], [kept])


def test_split_of_fp16_is_refused_with_the_name():
    params = [*parameters(BF16, shapes=[(2,)]), *parameters(torch.float16, shapes=[(2,)])]
    with pytest.raises(AmpValueError, match=r"param_groups\[0\]\['params'\]\[1\] is float16: pass master_weights=True"):
        FusedAdam(params, master_weights="split")
    optimizer = FusedAdam(params[:1], master_weights="split")
    with pytest.raises(AmpValueError, match=r"param_groups\[1\]\['params'\]\[0\] is float16"):
        optimizer.add_param_group({"params": params[1:]})
    assert len(optimizer.param_groups) == 1
    params[0].data = params[0].data.half()
    params[0].grad = torch.ones_like(params[0])
    with pytest.raises(AmpValueError, match=r"param_groups\[0\]\['params'\]\[0\] is float16"):
        optimizer.step()
    assert not optimizer.state


# --- kahan, stochastic, nearest ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", LOW.values(), ids=LOW)
@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("write_back", ["kahan", "stochastic", "nearest"])
def test_write_backs_without_masters(name, write_back, dtype):
    """Close to an fp32 run, with fp32 state, and nothing kept that is not needed."""
    ours = parameters(dtype)
    optimizer = BY_NAME[name](ours, write_back=write_back)
    fp32 = beside_fp32(ours, optimizer, BY_NAME[name], 3)
    ulp = torch.finfo(dtype).eps
    for p, q in zip(ours, fp32, strict=True):
        torch.testing.assert_close(p.detach().float(), q.detach(), rtol=3 * ulp, atol=3 * ulp)
    state = optimizer.state[ours[0]]
    assert state.keys() == {"step"} | STATE[name] | ({"compensation"} if write_back == "kahan" else set())
    assert all(state[key].dtype == torch.float32 for key in STATE[name])


def test_stochastic_numbers_differ_between_groups_whatever_their_seeds_and_from_step_to_step():
    """Of three calls with the seeds 2, 1 and 0, and of each two steps of theirs."""
    start = torch.ones(500, dtype=BF16)
    params = [nn.Parameter(start.clone()) for _ in range(3)]
    groups = [{"params": [p], "seed": 2 - i} for i, p in enumerate(params)]
    optimizer = FusedSGD(groups, lr=2.0**-9, write_back="stochastic")
    results = []
    for _ in range(3):
        with torch.no_grad():
            for p in params:
                p.copy_(start)
        give(params, [torch.ones_like(p) for p in params])
        optimizer.step()
        results += [p.detach().clone() for p in params]
    for i, a in enumerate(results):
        for b in results[:i]:  # as draws that know nothing of each other
            assert 180 < (a != b).sum() < 320
