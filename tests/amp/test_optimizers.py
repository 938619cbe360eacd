"""torch's optimizers, schedulers, closures and clipping under amp."""

import functools

import torch
from kit import Probe, backward, probe


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
