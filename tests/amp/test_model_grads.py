"""Gradients of masters whose optimizer reads those of the model: nobody can tell whether fp32 ones have been made."""

import functools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from host_reads import OpCalls
from kit import backward, grads, loss_of, mlp, snapshot, start
from torch import nn

from ampctx import clip_grad_norm_, optimizers

levels = pytest.mark.parametrize("level", ["O2", "O5"])


def begin(session, level, kind=optimizers.FusedAdam, **options):
    return start(session, level, functools.partial(kind, lr=0.01, weight_decay=0.1), **options)


def masters(session, model, optimizer):
    own = set(model.parameters())
    return [p for p in session.master_params(optimizer) if p not in own]


def blocks(*options):
    def accumulate(read, session, model, optimizer):
        for _ in range(2):
            for seed, given in enumerate(options):
                backward(session, loss_of(model, seed), optimizer, **given)
                if not given:
                    read()
            optimizer.step()
            optimizer.zero_grad()

    return accumulate


@levels
def test_a_backward_into_masters_adds_to_their_gradients(session, level):
    """autograd writes a leaf's gradient without asking Python."""
    model, optimizer = begin(session, level)
    backward(session, loss_of(model), optimizer)
    params = list(session.master_params(optimizer))
    expected = [g + 2 * p.detach() for g, p in zip(grads(session, optimizer), params, strict=True)]
    optimizer.zero_grad()
    backward(session, loss_of(model), optimizer)
    sum((p**2).sum() for p in params).backward()
    torch.testing.assert_close(grads(session, optimizer), expected)


# Bounds one after the other; the order of the norm.
CLIPS = [([0.05], 2.0), ([torch.tensor(0.05), 0.025], 2.0), ([0.05], 1.0), ([0.05], "inf")]


@levels
@pytest.mark.parametrize(("bounds", "order"), CLIPS, ids=str)
def test_clipped_gradients_read_afterwards(session, level, bounds, order):
    model, optimizer = begin(session, level)
    backward(session, loss_of(model), optimizer)
    whole = [g.clone() for g in grads(session, optimizer)]
    optimizer.zero_grad()
    backward(session, loss_of(model), optimizer)
    norms = [clip_grad_norm_(session.master_params(optimizer), bound, norm_type=order) for bound in bounds]
    expected = nn.utils.get_total_norm(whole, float(order))
    torch.testing.assert_close(torch.stack(norms), torch.tensor([expected, *bounds[:-1]]), rtol=1e-4, atol=0)
    clipped = [g * (bounds[-1] / (expected + 1e-6)) for g in whole]
    torch.testing.assert_close(grads(session, optimizer), clipped, rtol=1e-4, atol=1e-7)


def test_clipping_a_part_makes_the_gradients(session):
    model, optimizer = begin(session, "O2")
    backward(session, loss_of(model), optimizer)
    some, rest = (params := masters(session, model, optimizer))[:1], params[1:]
    clip_grad_norm_(some, 1e-3)
    torch.testing.assert_close(some[0].grad.norm(), torch.tensor(1e-3), rtol=1e-2, atol=0)
    assert nn.utils.get_total_norm([p.grad for p in rest]) > 1e-2


def test_clipping_several_optimizers_at_once(session):
    models = [mlp(0), mlp(1)]
    opts = [optimizers.FusedAdam(m.parameters(), lr=0.01) for m in models]
    session.initialize(models, opts, opt_level="O2", verbosity=0)
    with session.scale_loss(loss_of(models[0]) + loss_of(models[1]), opts) as scaled:
        scaled.backward()
    params = [p for o in opts for p in session.master_params(o)]
    norm = clip_grad_norm_(params, 0.05)
    torch.testing.assert_close(nn.utils.get_total_norm([p.grad for p in params]), torch.tensor(0.05), rtol=1e-3, atol=0)
    assert norm > 0.05


def test_error_if_nonfinite_changes_nothing(session):
    model, optimizer = begin(session, "O2")
    with session.scale_loss(loss_of(model), optimizer) as scaled:
        scaled.backward()
        model[0].bias.grad[0] = float("nan")
    with pytest.raises(RuntimeError, match="is non-finite, so it cannot be clipped"):
        clip_grad_norm_(session.master_params(optimizer), 1e-3, error_if_nonfinite=True)
    finite = [g[g.isfinite()] for g in grads(session, optimizer)]
    assert nn.utils.get_total_norm(finite) > 1e-2


@levels
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_drops_gradients_without_unscaling_them(session, level, set_to_none):
    model, optimizer = begin(session, level)
    backward(session, loss_of(model), optimizer)
    with OpCalls() as calls:
        optimizer.zero_grad(set_to_none=set_to_none)
    assert not (set_to_none and calls.of)
    for p in session.master_params(optimizer):
        assert p.grad is None if set_to_none else not p.grad.any()


def test_a_gradient_that_is_set_and_one_of_a_parameter_that_was_removed_are_the_programs(session):
    model, optimizer = begin(session, "O2")
    backward(session, loss_of(model), optimizer)
    first, second, *_ = masters(session, model, optimizer)
    optimizer.param_groups[0]["params"][:] = [p for p in optimizer.param_groups[0]["params"] if p is not first]
    type(optimizer).zero_grad(optimizer)
    assert first.grad.any()
    assert second.grad is None
    backward(session, loss_of(model), optimizer)
    second, third, *_ = masters(session, model, optimizer)
    second.grad = None
    assert second.grad is None
    assert third.grad.any()
    del third.grad
    assert third.grad is None


@pytest.mark.parametrize("kind", ["FusedSGD", "FusedLAMB"])
def test_grad_scale_set_by_hand_divides_too(session, kind):
    """It comes on top of the scale of the blocks."""
    results = []
    for is_read in (False, True):
        model, optimizer = start(session, "O2", kind, loss_scale=1.0)
        for seed in range(3):
            (loss_of(model, seed) * 1024.0).backward()
            if is_read:
                assert all(g is not None for g in grads(session, optimizer))
            optimizer.grad_scale = torch.tensor(1024.0)
            optimizer.step()
            del optimizer.grad_scale
            optimizer.zero_grad()
        results.append(snapshot(optimizer, model))
        session.reset()
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5 if mine.dtype == torch.float32 else 1e-3, atol=1e-7)


def test_threads_may_read_gradients(session):
    for _ in range(20):
        model, optimizer = begin(session, "O2")
        backward(session, loss_of(model), optimizer)
        params = masters(session, model, optimizer)
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda p: p.grad, params * 4))
        assert all(grad is not None for grad in found)
        session.reset()


def test_lamb_goes_by_the_norm_of_all_gradients_after_a_clip(session):
    """Of 16-bit and fp32 weights: a clip has joined their norms."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = optimizers.FusedLAMB(model.parameters(), betas=(0.0, 0.999), weight_decay=0.0, max_grad_norm=1.0)
    session.initialize(model, optimizer, opt_level="O2", loss_scale=1.0, verbosity=0)
    with session.scale_loss(sum(p.float().sum() for p in model.parameters()), optimizer) as scaled:
        scaled.backward()
    clip_grad_norm_(session.master_params(optimizer), 100.0)
    optimizer.step()
    for entry in optimizer.state.values():
        torch.testing.assert_close(entry["exp_avg"], torch.full_like(entry["exp_avg"], 18**-0.5))
