"""What a step leaves in ``.grad`` where a GradScaler has scaled: what torch's optimizers leave, unscaled gradients."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from host_reads import OpCalls
from kit import assert_same, params_of, snapshot
from optimizer_cases import BY_NAME, MODES, give, gradients, make, parameters
from tape import Tape
from torch import nn

import ampctx
from ampctx.kernels import definitions, ops
from ampctx.optimizers import FusedAdam, FusedSGD

SCALERS = {"torch": torch.amp.GradScaler, "ampctx": ampctx.GradScaler}
on_scalers = pytest.mark.parametrize("scaler_type", SCALERS.values(), ids=SCALERS)
on_optimizers = pytest.mark.parametrize("name", BY_NAME)
# As torch's optimizers have them.
TORCHS = {"adam": torch.optim.AdamW, "sgd": partial(torch.optim.SGD, momentum=0.9), "adagrad": torch.optim.Adagrad}


@pytest.fixture(scope="module")
def plain_torch():
    namespace = "ampctx_gradients_after_a_step"
    library = definitions.define(namespace)
    yield getattr(torch.ops, namespace)
    del library


@pytest.fixture(params=["compiled", "reference"])
def backend(request, monkeypatch):
    if request.param == "reference":
        monkeypatch.setattr(ops, "_ops", request.getfixturevalue("plain_torch"))
        monkeypatch.setattr(ops.extension, "reader", None)


def scaled(scaler_type=ampctx.GradScaler, scale=64.0):
    scaler = scaler_type("cpu", init_scale=scale)
    scaler.scale(torch.ones(()))
    return scaler


def grads_of(optimizer):
    return [p.grad.clone() for p in params_of(optimizer)]


@pytest.mark.full(but=24)
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("kind", ["clean", "overflow", "unscaled", "unscaled-overflow"])
@pytest.mark.parametrize("theirs", [torch.amp.GradScaler, ampctx.GradScaler], ids=SCALERS)
@on_scalers
@pytest.mark.parametrize("name", TORCHS)
def test_gradients_are_those_that_torch_leaves(name, scaler_type, theirs, kind):
    ours, torchs = BY_NAME[name](parameters()), TORCHS[name](parameters(), lr=0.01, fused=True)
    scalers = scaled(scaler_type), scaled(theirs)
    for step in range(3):
        for optimizer, scaler in zip((ours, torchs), scalers, strict=True):
            params = params_of(optimizer)
            grads = gradients(params, step, 64.0)
            if "overflow" in kind and step == 1:
                grads[0][0] = float("inf")
            give(params, [torch.empty_like(p).copy_(g) for p, g in zip(params, grads, strict=True)])
            if "unscaled" in kind:
                scaler.unscale_(optimizer)
                before = grads_of(optimizer)
            scaler.step(optimizer)
            if "unscaled" in kind:
                assert_same(grads_of(optimizer), before)
            scaler.update()
        if name == "adagrad" and kind == "overflow" and step == 1 and torch.__version__ < "2.13":
            continue  # torch 2.11's Adagrad unscales them at a skipped step
        assert_same(grads_of(ours), grads_of(torchs))


@pytest.mark.full(but=24)
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("mode", MODES)
@on_scalers
@on_optimizers
def test_of_every_optimizer_in_every_mode(name, scaler_type, mode):
    """Unscaling and skipping happen inside the op: the result is a plain run without the overflowed step. A plan of the
    first step makes the others."""
    optimizer, plain, scaler = make(name, mode), make(name, mode), scaled(scaler_type)
    params = params_of(optimizer)
    for step, bad in ((0, False), (1, False), (2, True), (3, False)):
        # In layouts of their own, some of them.
        grads = gradients(params, step)
        given = [g * (float("inf") if bad else scaler.get_scale()) for g in grads]
        kept = [g.clone() for g in given]
        give(params, given)
        with OpCalls() as calls:
            scaler.step(optimizer)
        assert calls.count == 0
        assert_same(given, kept if bad else grads)
        assert all(p.grad is g for p, g in zip(params, given, strict=True))
        scaler.update()
        if not bad:
            give(params_of(plain), grads)
            plain.step()
    assert scaler.get_scale() == 32.0
    assert_same(snapshot(optimizer), snapshot(plain))
    assert not {"found_inf", "grad_scale"} & vars(optimizer).keys()


@on_optimizers
def test_without_grad_scale_nothing_is_written(name):
    optimizer = make(name, "fp32")
    params = params_of(optimizer)
    for step in range(2):
        give(params, grads := gradients(params, step))
        kept = [g.clone() for g in grads]
        optimizer.found_inf = torch.tensor(0.0)
        optimizer.step()
        assert_same(grads, kept)
        assert all(g._version == 0 for g in grads)


def test_autograd_hears_of_gradients_that_were_written():
    p = nn.Parameter(torch.ones(3))
    optimizer, scaler = FusedSGD([p], lr=0.1), scaled()
    (grad,) = torch.autograd.grad(p.square().sum(), p, create_graph=True)
    later = grad.square().sum()
    p.grad = grad
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        later.backward()


# --- gradients that are not each a tensor of its own, laid out as its parameter ---------------------------------------


def test_what_lies_beside_a_gradient_stays():
    flat = torch.arange(10.0) * 64
    params = parameters(shapes=[(3,), (2, 2)])
    give(params, [flat[1:4], flat[5:9].view(2, 2)])
    scaled().step(FusedAdam(params))
    assert flat.tolist() == [0, 1, 2, 3, 256, 5, 6, 7, 8, 576]


@pytest.mark.full(but=16)
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("groups", [1, 2], ids=["one-call", "two-calls"])
@pytest.mark.parametrize("share", [lambda g: g, lambda g: g.view(2, 6), lambda g: g.t()], ids=["same", "view", "other"])
@on_optimizers
def test_a_gradient_that_two_parameters_share_is_unscaled_once(name, share, groups):
    pair = []
    for shared in (True, False):
        (first,), (empty,) = parameters(shapes=[(4, 3)]), parameters(shapes=[(0,)])
        grad = torch.arange(12.0).reshape(4, 3) * (64 if shared else 1)
        second = nn.Parameter(torch.ones_like(share(grad)))
        give([first, second, empty], [grad, share(grad) if shared else share(grad).clone(), torch.ones(0)])
        params = [first, second, empty]
        pair.append(BY_NAME[name]([{"params": params}] if groups == 1 else [{"params": [p]} for p in params]))
    for is_apart in (False, True, True, False):
        give(params_of(pair[0])[:2], [grad := torch.arange(12.0).reshape(4, 3) * 64, share(grad)])
        if is_apart:
            params_of(pair[0])[1].grad = share(grad).clone()
        scaler = scaled()
        scaler.step(pair[0])
        pair[1].step()
        assert_same([grad], [torch.arange(12.0).reshape(4, 3)])
        assert_same(snapshot(pair[0]), snapshot(pair[1]))


# --- what else a step may find ----------------------------------------------------------------------------------------


def test_lambs_own_clipping_is_not_left_in_gradients():
    optimizer = BY_NAME["lamb"](parameters(), max_grad_norm=1e-3)
    params = params_of(optimizer)
    give(params, [g * 64 for g in gradients(params, 0)])
    scaled().step(optimizer)
    assert_same(grads_of(optimizer), gradients(params, 0))


@pytest.mark.parametrize("name", ["adam", "lamb", "novograd"])
def test_a_captured_step_does_the_same(name):
    params = parameters(shapes=[(3,), (5,)])
    optimizer = BY_NAME[name](params, capturable=True)
    give(params, grads := [torch.ones(3), torch.ones(5)])
    optimizer.step()  # makes the state
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(64.0), torch.tensor(0.0)
    with Tape() as tape:
        optimizer.step()
    for scale, found_inf in ((64.0, 0.0), (3.0, 0.0), (3.0, 1.0)):
        # Of a scale that is no power of two: the product with its reciprocal, rounded once.
        optimizer.grad_scale.fill_(scale)
        optimizer.found_inf.fill_(found_inf)
        for g in grads:
            g.fill_(7.0)
        tape.replay()
        want = 7.0 if found_inf else torch.tensor(7.0) * torch.tensor(scale).reciprocal()
        assert_same(grads, [torch.full_like(g, want) for g in grads])


@pytest.mark.full
@pytest.mark.parametrize("shares", [False, True], ids=["apart", "shared"])
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_in_a_graph(compiler, shares):
    torch.compiler.reset()
    pair = [FusedAdam(parameters(shapes=[(4, 3), (4, 3)])) for _ in range(2)]
    for optimizer, step in (
        (pair[0], pair[0].step),
        (pair[1], torch.compile(lambda: pair[1].step(), backend=compiler, fullgraph=True)),
    ):
        for number in range(2):
            grads = gradients(params_of(optimizer), number, 64.0)
            give(params_of(optimizer), grads[:1] * 2 if shares else grads)
            optimizer.grad_scale = torch.tensor(64.0)
            step()
    assert_same(grads_of(pair[1]), grads_of(pair[0]))
    assert_same(grads_of(pair[1])[:1], gradients(params_of(pair[0]), 1)[:1])
    assert_same(snapshot(pair[1]), snapshot(pair[0]))
