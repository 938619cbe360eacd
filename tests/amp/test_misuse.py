"""Calls that would train on wrong numbers raise an error that names the fix. Correct programs hear nothing."""

import contextlib
import copy
import functools
import pickle
import weakref

import pytest
import torch
from host_reads import HostReads
from kit import LEVELS, SAM, assert_same, backward, grads, loss_of, mlp, probe, probes, start
from torch import nn

from ampctx import AmpAttributeError, AmpError, AmpTypeError, clip_grad_norm_, optimizers
from ampctx.amp import AmpSession, GradScaler

SCALED = [("O0", 128.0), ("O1", "dynamic"), ("O4", 128.0)]
X = torch.linspace(-1, 1, 32).reshape(8, 4)


def copies(*models):
    return [p.detach().clone() for model in models for p in model.parameters()]


class OfFramework(torch.amp.GradScaler):
    pass


AROUND = {"SGD": "SGD-foreach", "fused": "Adam-fused", "FusedAdam": "FusedAdam"}


# --- a GradScaler around masters --------------------------------------------------------------------------------------


@pytest.mark.full(but=6)
@pytest.mark.parametrize("kind", AROUND.values())
@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale_"])
@pytest.mark.parametrize("scaler", [torch.amp.GradScaler, OfFramework, GradScaler])
def test_a_grad_scaler_around_masters_is_refused_before_anything_is_stepped(session, level, kind, unscale, scaler):
    model, optimizer = start(session, level, kind)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps the step
    before, scaler = copies(model), scaler("cpu", init_scale=128.0)
    scaler.scale(loss_of(model)).backward()
    with pytest.raises(
        AmpError, match="a GradScaler was given an optimizer that is under amp with fp32 master weights"
    ):
        if unscale:
            scaler.unscale_(optimizer)  # which ampctx's refuses by itself
        scaler.step(optimizer)
    assert_same(copies(model), before)


@pytest.mark.parametrize("level", LEVELS)
def test_a_disabled_grad_scaler_passes(session, said, level):
    model, optimizer = start(session, level, "SGD-foreach", verbosity=1)
    before, scaler = copies(model), torch.amp.GradScaler("cpu", enabled=False)
    backward(session, scaler.scale(loss_of(model)), optimizer)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(copies(model)[0], before[0])
    assert said() == []


# --- a block over the wrong optimizer ---------------------------------------------------------------------------------


def reach_both(session, models, named, factor=1.0, **kwargs):
    backward(session, sum(m.loss(factor) for m in models), named, **kwargs)


@pytest.mark.full(but=6)
@pytest.mark.parametrize(("level", "scale"), SCALED)
@pytest.mark.parametrize("raises", [False, True], ids=["", "raises"])
@pytest.mark.parametrize("kind", ["step", "device", "sam"])
def test_scaled_gradients_of_another_optimizers_block_are_not_stepped(session, level, scale, raises, kind):
    make = {"step": torch.optim.SGD, "device": optimizers.FusedSGD, "sam": SAM}[kind]
    models, both = probes(session, level, make=functools.partial(make, lr=0.125), loss_scale=scale)
    before = copies(*models)
    with (
        pytest.raises(MemoryError) if raises else contextlib.nullcontext(),
        session.scale_loss(sum(m.loss(1.0) for m in models), both[0]) as scaled,
    ):
        scaled.backward()
        if raises:
            raise MemoryError
    with pytest.raises(AmpError, match=r"a scale_loss block over other.*models\[1\].weight, models\[1\].norm.weight"):
        both[1].first_step() if kind == "sam" else both[1].step()
    assert_same(copies(*models), before)
    both[1].zero_grad()
    reach_both(session, models, both)
    both[1].step()
    assert models[1].weight.eq(1.875).all()


ZERO = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer-zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, optimizer: model.zero_grad(),
    "model-zeros": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "data": lambda model, optimizer: [p.grad.data.zero_() for p in model.parameters() if p.grad is not None],
}


@pytest.mark.full(but=8)
@pytest.mark.parametrize("zero", ZERO)
@pytest.mark.parametrize("level", LEVELS)
def test_an_adversarial_loop_passes(session, said, level, zero):
    """The discriminator gets scaled gradients from the generator's block, and zeroes them before its own."""
    (d, g), (of_d, of_g) = probes(session, level, loss_scale="dynamic", num_losses=3, verbosity=1)
    for _ in range(3):
        ZERO[zero](d, of_d)
        for loss_id in (0, 1):
            backward(session, d.loss(0.5), of_d, loss_id=loss_id)
        assert all(torch.equal(grad, torch.ones_like(grad)) for grad in grads(session, of_d))
        of_d.step()
        ZERO[zero](g, of_g)
        reach_both(session, (d, g), of_g, 0.5, loss_id=2)
        of_g.step()
    master = next(iter(session.master_params(of_d)))
    assert torch.equal(master, torch.full_like(master, 2.0 - 3 * 0.125))
    assert said() == []


@pytest.mark.parametrize(("level", "scale"), SCALED)
def test_scaled_gradients_of_another_optimizers_block_are_not_added_up(session, level, scale):
    models, both = probes(session, level, loss_scale=scale)
    reach_both(session, models, both[0])
    left = models[1].weight.grad.clone()
    with pytest.raises(AmpError, match="has left scaled gradients in .*this block would add its own to them"):
        backward(session, models[1].loss(1.0), both[1])
    assert torch.equal(models[1].weight.grad, left)
    with pytest.raises(AmpError, match="has left scaled gradients"):
        both[1].step()
    with session.scale_loss(models[1].loss(1.0), both[1]) as scaled:
        both[1].zero_grad()  # in the block is early enough
        scaled.backward()
    both[1].step()
    assert models[1].weight.eq(1.875).all()


@pytest.mark.parametrize(("level", "scale"), SCALED)
def test_gradients_that_are_no_leftovers_of_another_block_pass(session, level, scale):
    # At a scale of 1 a block may reach more optimizers than it names.
    models, both = probes(session, level, loss_scale=1.0)
    reach_both(session, models, both[0])
    both[1].step()
    assert models[1].weight.eq(1.875).all()
    session.reset()
    models, both = probes(session, level, loss_scale=scale)
    # What a plain backward has left before the block, and the block does not touch.
    models[1].loss(1.0).backward()
    backward(session, models[0].loss(1.0), both[0])
    both[1].step()
    assert models[1].weight.eq(1.875).all()
    models[1].zero_grad()
    # A block of its own inside of the other one.
    with session.scale_loss(models[0].loss(1.0), both[0]) as scaled:
        backward(session, models[1].loss(1.0), both[1])
        scaled.backward()
    both[1].step()
    assert models[1].weight.eq(1.75).all()
    models[1].zero_grad()
    # Unscaled by hand.
    reach_both(session, models, both[0])
    for p in models[1].parameters():
        p.grad = torch.ones_like(p)
    both[1].step()
    assert models[1].weight.eq(1.625).all()


def test_blocks_over_several_optimizers_keep_no_gradient_alive_and_read_nothing(session):
    models, both = probes(session, "O1", loss_scale=128.0)
    with HostReads() as reads:
        reach_both(session, models, both[0])
        with session.scale_loss(models[1].loss(1.0), both[1]) as scaled:
            both[1].zero_grad()
            scaled.backward()
    assert reads.count == 0
    models[1].zero_grad()
    reach_both(session, models, both[0])
    alive = [weakref.ref(p.grad) for p in models[1].parameters()]
    models[1].zero_grad()
    assert [reference() for reference in alive] == [None] * 3


# --- clipping of scaled gradients -------------------------------------------------------------------------------------


@pytest.mark.parametrize("delays", [False, True], ids=["block", "delayed"])
@pytest.mark.parametrize("level", LEVELS)
def test_clipping_where_gradients_are_scaled_is_refused(session, level, delays):
    """Between delayed blocks not at a scale of 1 without masters. Other parameters may be clipped anywhere."""
    model, optimizer = probe(session, level)
    other = torch.nn.Parameter(torch.ones(2))
    with contextlib.ExitStack() as block:
        block.enter_context(session.scale_loss(model.loss(4.0), optimizer, delay_unscale=delays)).backward()
        if delays:
            block.close()
        for params in (model.parameters, lambda: session.master_params(optimizer)):
            if delays and level not in ("O1", "O2", "O5"):
                assert clip_grad_norm_(params(), 100.0) > 1.0
                continue
            before = [None if p.grad is None else p.grad.clone() for p in params()]
            with pytest.raises(AmpError, match=f"was called {'between' if delays else 'inside a scale_loss block'}"):
                clip_grad_norm_(params(), 1.0)
            assert_same([p.grad for p in params()], before)
        other.grad = torch.ones(2)
        assert clip_grad_norm_([other], 1.0) > 1.0
    backward(session, model.loss(4.0), optimizer)
    assert clip_grad_norm_(session.master_params(optimizer), 1.0) > 1.0
    optimizer.step()


# --- a missing with, a pair taken for the model -----------------------------------------------------------------------


@pytest.mark.parametrize("enabled", [True, False])
def test_scale_loss_without_with_says_what_is_missing(session, enabled):
    model, optimizer = probe(session, "O1", enabled=enabled)
    scaled = session.scale_loss(model.loss(1.0), optimizer)
    with pytest.raises(AmpError, match=r"write `with amp.scale_loss\(loss, optimizer\) as scaled_loss:`") as caught:
        scaled.backward()
    assert isinstance(caught.value, AttributeError)
    assert not hasattr(scaled, "item")
    for use in (lambda: scaled / 2, lambda: 2 * scaled, lambda: float(scaled)):
        with pytest.raises(AmpTypeError, match="amp.scale_loss is a context manager"):
            use()
    with scaled as loss:
        loss.backward()
    assert all(torch.equal(grad, torch.ones_like(grad)) for grad in grads(session, optimizer))


@pytest.mark.parametrize("level", LEVELS)
def test_scale_loss_serves_an_exit_stack_and_a_decorator(session, level):
    model, optimizer = probe(session, level, loss_scale=128.0)
    with contextlib.ExitStack() as stack:
        stack.enter_context(session.scale_loss(model.loss(1.0), optimizer)).backward()
    loss = model.loss(1.0)

    @session.scale_loss(loss, optimizer)
    def decorated():
        (128 * loss).backward(retain_graph=True)

    decorated()
    decorated()
    assert all(torch.equal(grad, torch.full_like(grad, 3.0)) for grad in grads(session, optimizer))
    block = session.scale_loss(model.loss(1.0), optimizer)
    with block, pytest.raises((AttributeError, RuntimeError)), block:
        pytest.fail("entered twice")
    with pytest.raises(StopIteration), session.scale_loss(model.loss(1.0), optimizer):
        raise StopIteration


@pytest.mark.parametrize("enabled", [True, False])
def test_the_pair_of_initialize_is_not_taken_for_the_model(session, enabled):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    result = session.initialize(model, optimizer, opt_level="O1", enabled=enabled, verbosity=0)
    for use in (lambda: result(X), lambda: result.train(), lambda: result.parameters()):
        with pytest.raises(AmpError, match=r"Write `model, optimizer = amp.initialize\(model, optimizer, ...\)`"):
            use()
    with pytest.raises(TypeError):
        result(X)
    with pytest.raises(AmpAttributeError, match="it has no 'train'"):
        result.train()
    assert not hasattr(result, "parameters")


def test_the_pair_of_initialize_is_a_tuple(session):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    result = session.initialize(model, optimizer, opt_level="O0", verbosity=0)
    first, second = result
    assert first is model is result[0]
    assert second is optimizer is result[-1]
    assert isinstance(result, tuple)
    assert result == (model, optimizer)
    session.reset()
    for copied in (copy.deepcopy(result), copy.copy(result), pickle.loads(pickle.dumps(result))):
        assert type(copied) is tuple
        assert len(copied) == 2
    assert session.initialize(mlp(), opt_level="O0", verbosity=0).training


# --- a second initialize ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_a_second_initialize_of_a_model_says_that_it_is_under_amp(session, level):
    model, optimizer = start(session, level, "SGD-foreach")
    again = torch.optim.SGD(mlp().parameters(), lr=0.1)
    for given in (model, nn.Sequential(model), model[0]):
        for with_optimizer in (optimizer, again, None):
            with pytest.raises(AmpError, match="Found param .* expected fp32: the model is under amp already") as told:
                session.initialize(given, with_optimizer, opt_level=level, verbosity=0)
            assert "in this session" in str(told.value)
            assert "Call amp.reset() first" in str(told.value)
    with pytest.raises(AmpError, match="is under amp already, in another AmpSession.* Call reset.. of that one first"):
        AmpSession().initialize(model, again, opt_level=level, verbosity=0)
    with pytest.raises(AmpError, match="[Rr]emove .half"):  # a copy is not taken for the model
        AmpSession().initialize(copy.deepcopy(model), opt_level=level, verbosity=0)
    session.reset()
    with pytest.raises(AmpError, match="is in two optimizers"):
        session.initialize(model, [optimizer, torch.optim.SGD(model.parameters(), lr=0.1)], opt_level="O2", verbosity=0)
    session.initialize(model, optimizer, opt_level=level, verbosity=0)


# --- optimizers inside an optimizer -----------------------------------------------------------------------------------


class Holds(torch.optim.Optimizer):
    """Steps optimizers inside it. ``place``: where it keeps them; ``shares``: its groups are theirs."""

    def __init__(self, params, place, shares):
        *most, last = params
        inside = [torch.optim.SGD(most, lr=0.1), torch.optim.SGD([last], lr=0.1)]
        super().__init__([*most, last], {"lr": 0.1})
        self.steps_inside = [one.step for one in inside]
        if place == "state":
            self.state["inside"] = inside[0]
        else:
            self.inside = inside if place == "list" else inside[0]
        if shares:
            self.param_groups = [group for one in inside for group in one.param_groups]

    def step(self, closure=None):
        for step in self.steps_inside:
            step()


@pytest.mark.parametrize("place", ["attribute", "list", "state"])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_an_optimizer_inside_another_that_would_miss_the_masters_is_refused(session, level, place):
    model = mlp()
    with pytest.raises(AmpError, match=r"optimizers\[0\] \(Holds\) holds a SGD with param groups of its own"):
        start(session, level, lambda params: Holds(params, place, False), model)
    assert model[0].weight.dtype == torch.float32


@pytest.mark.parametrize(("level", "shares"), [("O1", False), ("O2", True), ("O5", True)])
def test_an_optimizer_inside_another_trains_where_it_sees_the_weights(session, level, shares):
    model, optimizer = start(session, level, lambda params: Holds(params, "list", shares))
    before = copies(model)
    backward(session, loss_of(model), optimizer)
    optimizer.step()
    assert not any(torch.equal(p, former) for p, former in zip(copies(model), before, strict=True) if p.ndim == 2)


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O5"])
def test_one_flat_parameter_in_the_memory_of_the_model_is_refused(session, level):
    """Its gradient is a buffer that the model's gradients are views of: no block unscales it, and a cast parts both."""
    model = nn.Linear(4, 2)
    flat = nn.Parameter(torch.cat([p.detach().flatten() for p in model.parameters()]))
    other = nn.Parameter(torch.ones(1))
    model.weight.data, model.bias.data = flat.data[:8].view(2, 4), flat.data[8:]
    optimizer = torch.optim.SGD([other, flat], lr=0.1)
    with pytest.raises(AmpError, match=r"\(SGD\): .*\['params'\]\[1\] is no parameter of the model, and lies in"):
        session.initialize(model, optimizer, opt_level=level)
    session.initialize(model, torch.optim.SGD([other, *model.parameters()], lr=0.1), opt_level=level)


def test_parameters_cut_from_one_buffer_are_not_one_memory(session):
    buffer = torch.randn(8)
    model, criterion = nn.Linear(4, 1, bias=False), nn.Linear(4, 1, bias=False)
    model.weight.data, criterion.weight.data = buffer[:4].view(1, 4), buffer[4:].view(1, 4)
    optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.1)
    session.initialize(model, optimizer, opt_level="O1", verbosity=0)
