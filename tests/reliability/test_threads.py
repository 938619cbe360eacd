"""A session is used from one thread at a time, or says so; forwards and autograd's hooks may run in any."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from kit import backward, in_thread, train
from torch import nn

from ampctx import AmpError
from ampctx.amp import AmpSession
from ampctx.optimizers import FusedAdam


def setup(session, level, optim=torch.optim.SGD, **kwargs):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    # A generator of its own: the global one belongs to all threads.
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        nn.init.uniform_(p, -0.5, 0.5, generator=generator)
    optimizer = optim(model.parameters(), lr=0.125)
    session.initialize(model, optimizer, opt_level=level, verbosity=0, **kwargs)
    return model, optimizer


X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_casts_belong_to_the_thread_that_initialized(session, level):
    model, optimizer = setup(session, level)

    def enter():
        with session.scale_loss(model(X).float().sum(), optimizer):
            pytest.fail("entered")

    for name, call in (
        ("scale_loss", enter),
        ("reset", session.reset),
        ("initialize", lambda: session.initialize(nn.Linear(2, 2), opt_level="O0", verbosity=0)),
    ):
        match = f"amp.{name} was called in thread 'other', but amp.initialize switched on the casts.*'MainThread'"
        with pytest.raises(AmpError, match=match):
            in_thread(call)
    assert torch.is_autocast_enabled("cpu")
    assert all(p.grad is None for p in model.parameters())
    train(session, model, optimizer, 1)


@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
def test_other_levels_train_in_any_thread_while_others_read(sessions, level):
    """Threads that save the model and sample from it, at any moment of blocks and steps, change nothing."""

    def trained(run, n_readers):
        session, over = sessions(), threading.Event()
        model, optimizer = setup(session, level, FusedAdam, loss_scale=128.0)

        def read():
            while not over.is_set():
                model.state_dict()
                with torch.no_grad():
                    model(X)

        with ThreadPoolExecutor(2) as pool:
            readers = [pool.submit(read) for _ in range(n_readers)]
            try:
                run(lambda: train(session, model, optimizer, 200))
            finally:
                over.set()
        assert [reader.result() for reader in readers] == [None] * n_readers
        values = model.state_dict().values()
        run(session.reset)
        return values

    interval = sys.getswitchinterval()
    try:
        sys.setswitchinterval(1e-5)
        assert all(map(torch.equal, trained(in_thread, 2), trained(lambda work: work(), 0)))
    finally:
        sys.setswitchinterval(interval)


def test_a_block_that_is_open_in_another_thread(session):
    models = [nn.Linear(4, 2), nn.Linear(4, 2)]
    opts = [torch.optim.SGD(model.parameters(), lr=0.125) for model in models]
    session.initialize(models, opts, opt_level="O2", loss_scale=8.0, verbosity=0)

    def other():
        backward(session, models[1](X).float().sum(), opts[1])

    with session.scale_loss(models[0](X).float().sum(), opts[0]) as scaled:
        with pytest.raises(AmpError, match="scale_loss was called in thread 'other', but a scale_loss block .*open"):
            in_thread(other)
        with pytest.raises(AmpError, match="inside a scale_loss block"):
            in_thread(session.reset)
        scaled.backward()
    in_thread(other)
    for optimizer in opts:
        assert next(session.master_params(optimizer)).grad.abs().sum() > 0


def test_a_thread_that_ended_holds_nothing(session):
    model, optimizer = setup(session, "O2", loss_scale=8.0)
    blocks = []

    def leaves_a_block_open():
        block = session.scale_loss(model(X).float().sum(), optimizer)
        block.__enter__()
        blocks.append(block)

    in_thread(leaves_a_block_open)
    backward(session, model(X).float().sum(), optimizer)
    blocks.pop().__exit__(None, None, None)
    optimizer.step()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_threads_with_sessions_of_their_own(level):
    def work(_=None):
        session = AmpSession()
        model, optimizer = setup(session, level, loss_scale=128.0)
        train(session, model, optimizer, 10)
        session.reset()
        assert not torch.is_autocast_enabled("cpu")
        return [p.detach().clone() for p in model.parameters()]

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(work, range(4)))
    alone = work()
    assert all(torch.equal(p, q) for weights in results for p, q in zip(weights, alone, strict=True))


def replicate(model):
    """A replica in the way of torch.nn.parallel.replicate, which wants CUDA: tensors are views of the parameters."""
    replicas = {}
    for module in model.modules():
        replica = module._replicate_for_data_parallel()
        for name, p in module._parameters.items():
            if p is not None:
                # As replicate does: a tensor that is no leaf.
                setattr(replica, name, p.view_as(p))
        replicas[module] = replica
    for module, replica in replicas.items():
        for name, child in module._modules.items():
            replica._modules[name] = replicas[child]
    return replicas[model]
