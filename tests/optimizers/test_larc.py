"""LARC around torch's optimizers and ours."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
from host_reads import OpCalls
from kit import assert_same, each_copy, params_of
from optimizer_cases import give, gradients, parameters, run
from torch import nn

import ampctx
from ampctx._errors import AmpError, AmpValueError
from ampctx.optimizers import LARC, FusedAdam, FusedSGD

INNER = {
    "torch-sgd": lambda p, **o: torch.optim.SGD(p, **{"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05, **o}),
    "torch-adamw-fused": lambda p, **o: torch.optim.AdamW(p, **{"lr": 0.1, "fused": True, **o}),
    "sgd": lambda p, **o: FusedSGD(p, **{"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05, **o}),
    "adam": lambda p, **o: FusedAdam(p, **{"lr": 0.1, "weight_decay": 0.05, **o}),
}
# torch's fused kernels on the CPU (2.13) mix up gradients of another layout than the parameter's.
SHAPES = [(3, 5), (), (0,), (17,)]


def adapted(p, g, lr, weight_decay, trust_coefficient=0.02, eps=1e-8, clip=True, maximize=False):
    """The gradient that LARC gives to its optimizer, in fp64."""
    p, g = p.detach().double(), g.double()
    of_p, of_g = p.norm(), g.norm()
    if of_p == 0 or of_g == 0:
        return g
    rate = trust_coefficient * of_p / (of_g + of_p * weight_decay + eps)
    return (min(rate / lr, 1.0) if clip else rate) * (g + (-weight_decay if maximize else weight_decay) * p)


@pytest.mark.parametrize("clip", [True, False], ids=["clip", "no-clip"])
@pytest.mark.parametrize("name", INNER)
def test_against_the_formula_in_front_of_the_optimizer(name, clip):
    ours, plain = parameters(shapes=SHAPES), parameters(shapes=SHAPES)
    options = {"trust_coefficient": 0.05, "eps": 1e-6, "clip": clip}
    larc, expected = LARC(INNER[name](ours), **options), INNER[name](plain, weight_decay=0.0)
    decay = larc.param_groups[0]["weight_decay"]
    assert decay > 0
    with torch.no_grad():
        ours[0].zero_()
        plain[0].zero_()
    for step in range(10):
        grads = gradients(ours, step, scale=0.01 if step % 2 else 10.0)
        give(ours, [g.clone() for g in grads])
        give(plain, [adapted(p, g, 0.1, decay, **options).float() for p, g in zip(plain, grads, strict=True)])
        larc.step()
        expected.step()
    torch.testing.assert_close([p.detach() for p in ours], [p.detach() for p in plain], rtol=1e-5, atol=1e-6)
    assert larc.param_groups[0]["weight_decay"] == decay


@pytest.mark.parametrize(("name", "strided"), [*((name, False) for name in INNER), ("sgd", True)])
def test_weights_decay_where_the_step_goes_up_the_gradient(name, strided):
    ours = [nn.Parameter(torch.full((8,), 3.0)[:: 2 if strided else 1])]
    larc = LARC(INNER[name](ours, maximize=True, weight_decay=0.5))
    grads = [torch.full_like(p, -1e-3) for p in ours]
    expected = [adapted(p, g, 0.1, 0.5, maximize=True) for p, g in zip(ours, grads, strict=True)]
    give(ours, [g.clone() for g in grads])
    larc.step()
    torch.testing.assert_close([p.grad.double() for p in ours], expected, rtol=1e-6, atol=0)
    assert all((p < 3.0).all() for p in ours)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_gradients_are_rounded_once(dtype):
    """After the rate: fp16 has no number as small as the unscaled ones. A skipped step leaves them as they are."""
    ours = parameters(dtype, shapes=[*SHAPES, (4,), (700,)])
    grads = [torch.full_like(p, 2.0**-20) for p in ours]
    ours[0].data.zero_()
    grads[4].zero_()
    options = {"weight_decay": 2.0**-24, "trust_coefficient": 64.0, "clip": False}
    larc = LARC(FusedSGD(ours, lr=0.1, weight_decay=options["weight_decay"]), 64.0, clip=False)
    for skips in (1.0, 0.0):
        larc.found_inf, larc.grad_scale = torch.tensor(skips), torch.tensor(2.0**10)
        give(ours, [g.clone() for g in grads])
        taken = [adapted(p, g.double() / 2**10, 0.1, **options).to(dtype) for p, g in zip(ours, grads, strict=True)]
        larc.step()
        left = [p.grad for p in ours]
        torch.testing.assert_close(left, grads if skips else taken, rtol=torch.finfo(dtype).eps, atol=0)


def test_groups_have_their_own_lr_and_decay_and_a_tensor_lr_is_not_read():
    first, second, unused = parameters(shapes=[(3,), (3,), (2,)])
    groups = [
        {"params": [first], "lr": 0.5},
        {"params": [second, unused], "lr": torch.tensor(0.1), "weight_decay": 0.3},
    ]
    larc = LARC(FusedSGD(groups, lr=0.1))
    grads = gradients([first, second], 0)
    expected = [adapted(first, grads[0], 0.5, 0.0), adapted(second, grads[1], 0.1, 0.3)]
    give([first, second], grads)
    with OpCalls() as calls:
        larc.step()
    assert calls.count == 0
    assert calls.of == {"multi_tensor_unscale_l2norm": 4, "multi_tensor_axpby": 2, "multi_tensor_sgd": 2}
    torch.testing.assert_close([p.grad.double() for p in (first, second)], expected, rtol=1e-6, atol=1e-7)
    assert [group["weight_decay"] for group in larc.param_groups] == [0.0, 0.3]


def test_weight_decay_is_there_again_after_an_exception():
    larc = LARC(INNER["torch-sgd"](parameters()))

    def closure():
        assert larc.param_groups[0]["weight_decay"] == 0
        raise KeyError("from the model")

    with pytest.raises(KeyError, match="from the model"):
        larc.step(closure)
    assert larc.param_groups[0]["weight_decay"] == 0.05


@pytest.mark.parametrize("name", INNER)
def test_closures(name):
    (p,) = parameters(shapes=[(3,)])
    larc = LARC(INNER[name]([p]))
    start = p.detach().clone()

    def closure():
        assert torch.is_grad_enabled()
        larc.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    decay = larc.param_groups[0]["weight_decay"]
    assert larc.step(closure).item() == start.square().sum().item()
    torch.testing.assert_close(p.grad.double(), adapted(start, 2 * start, 0.1, decay), rtol=1e-6, atol=0)


def test_it_is_apexs_plain_object():
    optimizer = INNER["torch-sgd"](parameters())
    larc = LARC(optimizer)
    assert larc.optim is optimizer
    assert larc.state is optimizer.state
    assert larc.param_groups is optimizer.param_groups
    assert not isinstance(larc, torch.optim.Optimizer)
    assert weakref.WeakKeyDictionary({larc: 1})[larc] == 1
    run(larc, 1)
    (late,) = parameters(shapes=[(2,)])
    larc.add_param_group({"params": [late]})
    assert optimizer.param_groups[1]["params"] == [late]
    other = LARC(INNER["torch-sgd"]([{"params": parameters()}, {"params": parameters(shapes=[(2,)])}]))
    other.load_state_dict(larc.state_dict())
    torch.testing.assert_close(other.state_dict(), larc.state_dict(), rtol=0, atol=0)
    larc.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in params_of(larc))
    groups = list(larc.param_groups)
    larc.param_groups = groups
    assert optimizer.param_groups is groups
    assert repr(larc).startswith("LARC(SGD (")


@each_copy
def test_a_copy_under_amp_steps_its_own_parameters(copied):
    """Not the original's, through a method that amp has replaced on it."""
    model, session = torch.nn.Linear(2, 2), ampctx.AmpSession()
    larc = LARC(torch.optim.SGD(model.parameters(), lr=0.125))
    session.initialize(model, larc, opt_level="O1", verbosity=0)
    other = copied(larc)
    before = [p.detach().clone() for p in model.parameters()]
    for p in other.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    other.step()
    assert all(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))
    assert not torch.equal(other.param_groups[0]["params"][0], before[0])
    session.reset()


# --- under amp --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scaler_type", [torch.amp.GradScaler, ampctx.GradScaler], ids=["torch", "ampctx"])
@pytest.mark.parametrize("name", INNER)
def test_grad_scalers_step_it(name, scaler_type):
    """Unscaled once, in LARC, which leaves what it has adapted; a step that overflowed changes nothing."""
    ours, plain = parameters(shapes=SHAPES), parameters(shapes=SHAPES)
    larc, expected = LARC(INNER[name](ours)), LARC(INNER[name](plain))
    scaler = scaler_type("cpu", init_scale=64.0)
    scaler.scale(torch.ones(()))
    for step in range(4):
        grads = gradients(ours, step)
        give(ours, [g * (math.inf if step == 1 else scaler.get_scale()) for g in grads])
        before = [p.detach().clone() for p in ours]
        scaler.step(larc)
        scaler.update()
        if step == 1:
            assert_same([p.detach() for p in ours], before)
        else:
            give(plain, grads)
            expected.step()
            assert_same([p.grad for p in ours], [p.grad for p in plain])
    assert scaler.get_scale() == 32.0
    assert_same([p.detach() for p in ours], [p.detach() for p in plain])
    for optimizer in (larc, larc.optim):
        assert not {"found_inf", "grad_scale"} & vars(optimizer).keys()


def test_errors_come_before_anything_changes():
    embedding = nn.Embedding(5, 3, sparse=True)
    (dense,) = parameters(shapes=[(3,)])
    larc = LARC(torch.optim.SGD([{"params": [dense]}, {"params": [embedding.weight]}], lr=0.1, weight_decay=0.1))
    dense.grad = torch.ones(3)
    embedding(torch.tensor([1, 1])).sum().backward()
    before = [dense.detach().clone(), embedding.weight.detach().clone()]
    with pytest.raises(
        AmpError, match=r"LARC does not support sparse gradients, and param_groups\[1\]\['params'\]\[0\] has one"
    ):
        larc.step()
    assert_same([dense.detach(), embedding.weight.detach(), dense.grad], [*before, torch.ones(3)])
    z = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    z.grad = torch.ones_like(z)
    with pytest.raises(
        AmpValueError, match=r"LARC does not support complex parameters, and param_groups\[0\]\['params'\]"
    ):
        LARC(torch.optim.SGD([z], lr=0.1)).step()

    odd, plain = nn.Parameter(torch.ones(3).to(torch.float8_e4m3fn)), parameters(shapes=[(3,)])[0]
    plain.grad, odd.grad = torch.ones(3), torch.ones(3).to(torch.float8_e4m3fn)
    with pytest.raises(AmpValueError, match=r"LARC requires float32.*\['params'\]\[1\] is torch.float8_e4m3fn"):
        LARC(torch.optim.SGD([plain, odd], lr=0.1)).step()
    assert torch.equal(plain.grad, torch.ones(3))


def test_something_that_is_no_optimizer_is_refused():
    with pytest.raises(TypeError, match="optimizer must be an optimizer to wrap, got int"):
        LARC(3)
