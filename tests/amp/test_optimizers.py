"""torch's optimizers, schedulers, closures and clipping under amp."""

import copy
import functools
import itertools

import pytest
import torch
from kit import (
    OPTIMIZERS,
    Probe,
    backward,
    batch,
    every_level,
    grads,
    loss_of,
    mlp,
    probe,
    start,
)

from ampctx import amp, clip_grad_norm_


@every_level
@pytest.mark.parametrize("clip", [torch.nn.utils.clip_grad_norm_, clip_grad_norm_], ids=["torch", "ampctx"])
def test_clipping_master_params(session, level, clip):
    model, optimizer = probe(session, level, loss_scale=1024.0)
    backward(session, model.loss(2.0), optimizer)
    norm = clip(amp.master_params(optimizer), 1.0)
    torch.testing.assert_close(norm.float(), torch.tensor(2.0 * 7**0.5), rtol=1e-3, atol=1e-3)
    total = torch.linalg.vector_norm(torch.cat([g.float() for g in grads(session, optimizer)]))
    torch.testing.assert_close(total, torch.tensor(1.0), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", ["SGD-foreach", "Adam-foreach", "AdamW-fused", "Adagrad-foreach"])
@pytest.mark.parametrize("level", ["O0", "O2"])
def test_scaling_by_powers_of_two_changes_no_bit(session, level, name):
    """With exact factors the loop must equal the same arithmetic written out by hand."""
    model = mlp()
    session.initialize(model, opt_level=level, verbosity=0)
    by_hand = copy.deepcopy(model)
    masters = [p.detach().float().clone().requires_grad_() for p in by_hand.parameters()]
    reference = OPTIMIZERS[name](masters, weight_decay=1e-3)
    optimizer = OPTIMIZERS[name](model.parameters(), weight_decay=1e-3)
    other = amp.AmpSession()
    other.allow_incoming_model_not_fp32 = True
    other.initialize(model, optimizer, opt_level="O2", cast_model_type=False, loss_scale=1024.0, verbosity=0)
    for step in range(10):
        optimizer.zero_grad()
        backward(other, loss_of(model, step), optimizer)
        optimizer.step()
        by_hand.zero_grad()
        (loss_of(by_hand, step) * 1024.0).backward()
        for p, m in zip(by_hand.parameters(), masters, strict=True):
            m.grad = p.grad.float() / 1024.0
        reference.step()
        with torch.no_grad():
            for p, m in zip(by_hand.parameters(), masters, strict=True):
                p.copy_(m)
    for p, q in itertools.chain(
        zip(model.parameters(), by_hand.parameters(), strict=True),
        zip(amp.master_params(optimizer), masters, strict=True),
    ):
        assert torch.equal(p, q)
    other.reset()


def test_double_backward_through_the_scaled_loss(session):
    model, optimizer = start(session, "O0", "SGD-foreach", loss_scale=64.0)
    x = batch().requires_grad_()
    with session.scale_loss(model(x).square().mean(), optimizer) as scaled:
        (gx,) = torch.autograd.grad(scaled, x, create_graph=True)
        (scaled + (gx / 64.0).square().sum() * 64.0).backward()
    reference = mlp()
    x = batch().requires_grad_()
    loss = reference(x).square().mean()
    (gx,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + gx.square().sum()).backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_arguments_of_step_reach_the_optimizer(session):
    class Scaled(torch.optim.SGD):
        def step(self, closure=None, factor=None):
            self.seen = (closure, factor)
            return super().step()

    model = Probe()
    optimizer = Scaled(model.parameters(), lr=0.1)
    session.initialize(model, optimizer, opt_level="O1", verbosity=0)
    for args, kwargs in (
        ((None, 5), {}),
        ((), {"factor": 5}),
        ((None,), {"factor": 5}),
        ((), {"closure": None, "factor": 5}),
    ):
        optimizer.step(*args, **kwargs)
        assert optimizer.seen == (None, 5)
    optimizer.step(lambda: None, 5)
    assert callable(optimizer.seen[0])
    assert optimizer.seen[1] == 5


def test_a_wrapper_of_the_users_survives_reset(session):
    _, optimizer = probe(session, "O1")
    calls = []
    inner = optimizer.step

    @functools.wraps(inner)
    def counted(*args, **kwargs):
        calls.append(1)
        return inner(*args, **kwargs)

    optimizer.step = counted
    session.reset()
    optimizer.step()
    assert calls == [1]


def test_a_tensor_lr_stays_the_users_object_after_a_skipped_closure(session):
    model = Probe()
    lr = torch.tensor(0.125)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, capturable=False, foreach=False)
    session.initialize(model, optimizer, opt_level="O1", verbosity=0)

    def closure():
        backward(session, model.loss(float("inf")), optimizer)
        return model.loss(1.0)

    assert optimizer.step(closure) is None
    assert optimizer.param_groups[0]["lr"] is lr
