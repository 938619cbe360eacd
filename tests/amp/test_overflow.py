"""What overflows, what is skipped, and what the scale does then."""

import pytest
import torch
from kit import INF, LEVELS, START, backward, probe, probes, scale_of, snapshot


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
