"""What overflows, what is skipped, and what the scale does then."""

import pytest
import torch
from kit import INF, LEVELS, START, backward, probe, probes, same, scale_of, snapshot


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_two_overflows_before_a_step_skip_one_step_and_halve_twice(session, level):
    model, optimizer = probe(session, level)
    backward(session, model.loss(INF), optimizer)
    backward(session, model.loss(INF), optimizer)
    optimizer.step()
    optimizer.zero_grad()
    assert scale_of(session) == START / 4
    assert session.skipped_steps(optimizer) == 1
    backward(session, model.loss(1.0), optimizer)
    before = snapshot(optimizer, model)
    optimizer.step()
    assert not torch.equal(before[0], snapshot(optimizer, model)[0])


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_only_the_optimizers_of_the_block_are_skipped(session, level):
    models, optimizers = probes(session, level, 3, num_losses=2)
    inf = sum(m.loss(float("inf")) for m in models[:2])
    backward(session, inf, optimizers[:2], loss_id=0)
    backward(session, models[2].loss(1.0), optimizers[2], loss_id=1)
    for optimizer in optimizers:
        optimizer.step()
    assert [session.skipped_steps(o) for o in optimizers] == [1, 1, 0]
    assert models[0].weight.eq(2).all()
    assert models[1].weight.eq(2).all()
    assert models[2].weight.eq(1.875).all()


@pytest.mark.parametrize("make", ["SGD-plain", "FusedSGD"])
@pytest.mark.parametrize("bad", [0, 1], ids=["first", "second"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_of_either_loss_skips_the_step(session, level, bad, make):
    model, optimizer = probe(session, level, n_losses=2, make=make)
    before = [p.detach().clone() for p in session.master_params(optimizer)]
    for loss_id in range(2):
        backward(session, model.loss(INF if loss_id == bad else 1.0), optimizer, loss_id=loss_id)
    optimizer.step()
    assert same(session.master_params(optimizer), before)
    assert [scale_of(session, i) for i in range(2)] == [START / 2 if i == bad else START for i in range(2)]


@pytest.mark.parametrize("level", LEVELS)
def test_a_static_scale_is_neither_checked_nor_changed(session, level):
    model, optimizer = probe(session, level, loss_scale=8.0)
    backward(session, model.loss(INF), optimizer)
    optimizer.step()
    assert session.skipped_steps(optimizer) == 0
    assert not torch.isfinite(model.weight).any()
    assert session.state_dict()["loss_scaler0"] == {"loss_scale": 8.0, "unskipped": 1}


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_growth_after_the_window_and_bounds(session, level):
    model, optimizer = probe(session, level, loss_scale="dynamic", min_loss_scale=16384.0, max_loss_scale=131072.0)
    session.load_state_dict({"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 1998}})
    for expected in (65536.0, 131072.0):
        backward(session, model.loss(1e-6), optimizer)
        assert scale_of(session) == expected
    session.load_state_dict({"loss_scaler0": {"loss_scale": 131072.0, "unskipped": 1999}})
    backward(session, model.loss(1e-6), optimizer)
    assert scale_of(session) == 131072.0
    optimizer.zero_grad()
    for expected in (65536.0, 32768.0, 16384.0, 16384.0):
        backward(session, model.loss(INF), optimizer)
        assert scale_of(session) == expected
