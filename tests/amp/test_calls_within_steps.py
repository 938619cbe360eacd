"""What hooks and closures of a step call, blocks that outlive their session, and pickles of earlier versions."""

import pickle
import sys

import pytest
import torch
from kit import Probe, backward

from ampctx import AmpStallError, GradScaler
from ampctx.amp import AmpSession, former_names

LEVELS = ("O0", "O2")


def training(session, level, **options):
    model = Probe()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    session.initialize(model, optimizer, opt_level=level, loss_scale=4.0, verbosity=0, **options)
    return model, optimizer


def iterate(session, model, optimizer):
    optimizer.zero_grad()
    backward(session, model.loss(1.0), optimizer)
    optimizer.step()


@pytest.mark.parametrize("register", ["register_step_pre_hook", "register_step_post_hook"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_hook_of_a_step_saves(session, level, register):
    model, optimizer = training(session, level)
    saved = []
    getattr(optimizer, register)(lambda *_: saved.append(session.state_dict(grads=True)))
    iterate(session, model, optimizer)
    assert len(saved) == 1
    iterate(session, model, optimizer)
    assert len(saved) == 2


@pytest.mark.parametrize("level", LEVELS)
def test_a_hook_of_a_step_resets(session, level):
    model, optimizer = training(session, level)
    handle = optimizer.register_step_post_hook(lambda *_: session.reset())
    iterate(session, model, optimizer)
    handle.remove()
    assert model.weight.dtype == torch.float32
    before = model.weight.detach().clone()
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()  # the plain one
    assert torch.equal(model.weight, before - 0.125)


@pytest.mark.parametrize("level", LEVELS)
def test_a_block_that_a_generator_holds_open_ends_after_reset(session, level):
    model, optimizer = training(session, level)

    def held():
        with session.scale_loss(model.loss(1.0), optimizer) as scaled:
            yield scaled

    generator = held()
    with pytest.raises(OSError, match="data"), session.scale_loss(model.loss(1.0), optimizer):
        next(generator)
        raise OSError("data")
    session.reset()
    generator.close()
    session.initialize(model, optimizer, opt_level=level, loss_scale=4.0, verbosity=0)
    iterate(session, model, optimizer)


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_goes_on_after_a_stall(fused):
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([p], lr=0.125, fused=fused)
    scaler = GradScaler("cpu", init_scale=4.0, max_consecutive_skips=1)
    with pytest.raises(AmpStallError):
        for _ in range(4):
            optimizer.zero_grad()
            scaler.scale((p * float("inf")).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    optimizer.zero_grad()
    scaler.scale(p.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(p, torch.full((3,), 0.875))


FORMER = [(module, name) for module, contents in former_names._CONTENTS.items() for name in contents]


@pytest.mark.parametrize(("module", "name"), FORMER)
def test_pickles_find_classes_by_their_former_names(module, name):
    found = pickle.loads(f"campctx.amp.{module}\n{name}\n.".encode())
    assert found is getattr(sys.modules[f"ampctx.amp.{module}"], name)
    assert callable(found)


@pytest.mark.parametrize("level", ["O0", "O2", "O4"])
def test_a_pickled_model_of_an_earlier_version_loads(level):
    """As whole models were saved while casts lived in ``ampctx.amp``."""
    session, model = AmpSession(), torch.nn.Linear(2, 2)
    session.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0)
    data = pickle.dumps(model, protocol=2)
    session.reset()
    for now, former in (
        (b"ampctx.casts.casting\n", b"ampctx.amp.casting\n"),
        (b"ampctx.casts.autocast\nForwardHook\n", b"ampctx.amp.autocast\n_ForwardHook\n"),
        (b"ampctx.casts.model_watch\n", b"ampctx.amp.model_watch\n"),
        (b"ampctx.masters.params\n", b"ampctx.amp.master_params\n"),
    ):
        data = data.replace(now, former)
    assert b"ampctx.casts" not in data
    assert pickle.loads(data)(torch.ones(1, 2)).shape == (1, 2)
