import copy
import itertools
import logging
import warnings

import pytest
import torch
from host_reads import HostReads
from models import LEVELS, assert_unchanged, batch, loss_of, mlp, snapshot
from torch import nn

from ampctx import AmpError, AmpIndexError, AmpTypeError, amp, clip_grad_norm_


class Probe(nn.Module):
    """One weight of each kind, gradients under the caller's control: d loss / d weight = the factor, for every
    element."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 2.0))
        self.norm = nn.BatchNorm1d(2)

    def loss(self, factor):
        return sum((p.float() * factor).sum() for p in self.parameters())


# The highest start at which a gradient of 8 still fits into fp16.
START = 4096.0


def probe(session, level, n_losses=1, **kwargs):
    model = Probe()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    kwargs = {"max_loss_scale": START, "verbosity": 0, **kwargs}
    session.initialize(model, optimizer, opt_level=level, num_losses=n_losses, **kwargs)
    return model, optimizer


def backward(session, model, optimizer, factor, **kwargs):
    with session.scale_loss(model.loss(factor), optimizer, **kwargs) as scaled:
        scaled.backward()


def grads(optimizer):
    return [p.grad for p in amp.master_params(optimizer)]


def scale_value(session, i=0):
    return session.state_dict()[f"loss_scaler{i}"]["loss_scale"]


# --- unscaling and accumulation --------------------------------------------------------------------------------------


@pytest.mark.parametrize("passes", [1, 2, 3])
@pytest.mark.parametrize("loss_scale", [1.0, 128.0, "dynamic"])
@pytest.mark.parametrize("level", LEVELS)
def test_gradients_are_unscaled_and_accumulate(session, level, loss_scale, passes):
    model, optimizer = probe(session, level, loss_scale=loss_scale)
    for _ in range(passes):
        backward(session, model, optimizer, 0.5)
    for grad in grads(optimizer):
        assert torch.equal(grad, torch.full_like(grad, 0.5 * passes))


@pytest.mark.parametrize("level", LEVELS)
def test_yields_the_scaled_fp32_loss(session, level):
    model, optimizer = probe(session, level, loss_scale=64.0)
    loss = model.loss(1.0)
    with session.scale_loss(loss.half(), optimizer) as scaled:
        assert scaled.dtype == torch.float32
        assert scaled.item() == loss.half().item() * 64
    with session.scale_loss(loss.double(), optimizer) as scaled:
        assert scaled.dtype == torch.float64


@pytest.mark.parametrize("level", LEVELS)
def test_different_scales_within_one_step(session, level):
    model, optimizer = probe(session, level, n_losses=2, loss_scale=4.0)
    session.loss_scales[1].set(16.0)
    backward(session, model, optimizer, 0.5, loss_id=0)
    backward(session, model, optimizer, 0.25, loss_id=1)
    backward(session, model, optimizer, 1.0, loss_id=-1)
    assert all(torch.equal(g, torch.full_like(g, 1.75)) for g in grads(optimizer))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("zero", ["optimizer", "model", "optimizer-zeros"])
def test_step_and_zero_grad_start_afresh(session, level, zero):
    model, optimizer = probe(session, level, loss_scale=8.0)
    for _ in range(2):
        backward(session, model, optimizer, 1.0)
        optimizer.step()
        if zero == "model":
            model.zero_grad()
        else:
            optimizer.zero_grad(set_to_none=zero == "optimizer")
    weight = next(iter(amp.master_params(optimizer)))
    assert torch.equal(weight, torch.full_like(weight, 1.75))
    assert torch.equal(model.weight.float(), weight.float())


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_the_model_holds_no_scaled_gradients_afterwards(session, level):
    model, optimizer = probe(session, level, loss_scale=128.0)
    backward(session, model, optimizer, 1.0)
    assert model.weight.grad is None


@pytest.mark.parametrize("level", LEVELS)
def test_parameters_without_a_gradient(session, level):
    model, optimizer = probe(session, level, loss_scale="dynamic")
    for used in (model.weight, model.norm.weight):
        with session.scale_loss(used.float().sum(), optimizer) as scaled:
            scaled.backward()
    for p, master in zip(model.parameters(), list(amp.master_params(optimizer)), strict=True):
        expected = torch.ones_like(master) if p is model.weight or p is model.norm.weight else None
        assert (master.grad is None) == (expected is None)
        assert expected is None or torch.equal(master.grad, expected)
    optimizer.step()


@pytest.mark.parametrize("level", LEVELS)
def test_a_step_without_any_gradient_changes_nothing(session, level):
    model, optimizer = probe(session, level, loss_scale="dynamic")
    before = snapshot(optimizer, model)
    with session.scale_loss(torch.zeros((), requires_grad=True), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert_unchanged(before, snapshot(optimizer, model))


@pytest.mark.parametrize("level", LEVELS)
def test_plain_backward_outside_the_block_counts_too(session, level):
    model, optimizer = probe(session, level, loss_scale=128.0)
    model.loss(1.0).backward()
    backward(session, model, optimizer, 0.5)
    model.loss(0.25).backward()
    optimizer.step()
    weight = next(iter(amp.master_params(optimizer)))
    assert torch.equal(weight, torch.full_like(weight, 2 - 1.75 / 8))


@pytest.mark.parametrize("level", LEVELS)
def test_nested_blocks(session, level):
    model, optimizer = probe(session, level, n_losses=2, loss_scale=4.0)
    session.loss_scales[1].set(32.0)
    backward(session, model, optimizer, 1.0)
    with session.scale_loss(model.loss(0.5), optimizer, loss_id=0) as outer:
        outer.backward(retain_graph=True)
        backward(session, model, optimizer, 2.0, loss_id=1)
        outer.backward()
    assert all(torch.equal(g, torch.full_like(g, 4.0)) for g in grads(optimizer))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_scale_that_moves_inside_a_nested_block(session, level):
    model, other = Probe(), Probe()
    optimizer, second = (torch.optim.SGD(m.parameters(), lr=0.125) for m in (model, other))
    session.initialize([model, other], [optimizer, second], opt_level=level, max_loss_scale=START, verbosity=0)
    with session.scale_loss(model.loss(1.0), optimizer) as outer:
        overflow(session, other, second)
        outer.backward()
    assert all(torch.equal(g, torch.full_like(g, 1.0)) for g in grads(optimizer))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("accumulated", [0, 1, 2])
def test_an_exception_leaves_gradients_as_before_the_block(session, level, accumulated):
    model, optimizer = probe(session, level, loss_scale="dynamic")
    for _ in range(accumulated):
        backward(session, model, optimizer, 1.0, delay_unscale=True)
    tensors = [*model.parameters(), *amp.master_params(optimizer)]
    before = [None if p.grad is None else p.grad.clone() for p in tensors]
    state = session.state_dict()
    with pytest.raises(MemoryError, match="in the body"), session.scale_loss(model.loss(3.0), optimizer) as scaled:
        scaled.backward()
        raise MemoryError("in the body")
    for old, p in zip(before, tensors, strict=True):
        assert old is p.grad is None or torch.equal(old, p.grad)
    assert session.state_dict() == state
    backward(session, model, optimizer, 1.0)
    assert all(torch.equal(g, torch.full_like(g, accumulated + 1.0)) for g in grads(optimizer))


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_gradients_that_are_views_into_a_bucket(session, level):
    """DistributedDataParallel may keep gradients in a buffer that the next backward overwrites."""
    model, optimizer = probe(session, level, loss_scale=4.0)
    p = model.norm.weight
    bucket = torch.zeros(10)

    def reduce_into_bucket(param):
        bucket[3:5] = param.grad
        param.grad = bucket[3:5]

    handle = p.register_post_accumulate_grad_hook(reduce_into_bucket)
    for _ in range(2):
        backward(session, model, optimizer, 1.0)
    handle.remove()
    assert torch.equal(p.grad, torch.full_like(p, 2.0))


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_sparse_gradients(session, level):
    torch.manual_seed(0)
    model = nn.Embedding(6, 3, sparse=True)
    start = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    session.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    for _ in range(2):
        with session.scale_loss(model(torch.tensor([1, 1, 4])).sum(), optimizer) as scaled:
            scaled.backward()
    optimizer.step()
    expected = start.clone()
    expected[1] -= 2.0
    expected[4] -= 1.0
    assert torch.equal(next(iter(amp.master_params(optimizer))), expected)


def test_sparse_duplicates_that_overflow_when_summed(session):
    model = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    session.initialize(model, optimizer, opt_level="O2", loss_scale="dynamic", verbosity=0)
    before = snapshot(optimizer, model)
    with session.scale_loss(model(torch.tensor([1, 1])).sum() * 0.75, optimizer) as scaled:
        scaled.backward()  # 0.75 * 65536 fits fp16, its double does not
    optimizer.step()
    assert_unchanged(before, snapshot(optimizer, model))
    assert session.skipped_steps(optimizer) == 1


@pytest.mark.parametrize("level", LEVELS)
def test_channels_last_and_expanded_gradients(session, level):
    model = nn.Conv2d(3, 4, 2, bias=False).to(memory_format=torch.channels_last)
    start = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    session.initialize(model, optimizer, opt_level=level, loss_scale=4.0, verbosity=0)
    fill = torch.arange(48.0).reshape(4, 3, 2, 2)
    for grad in (fill, fill.to(memory_format=torch.channels_last), torch.ones(1, 1, 1, 1).expand(4, 3, 2, 2)):
        with session.scale_loss(torch.zeros(()), optimizer):
            model.weight.grad = (grad * 4).to(model.weight.dtype) if grad.stride()[0] else grad.to(model.weight.dtype)
    (master,) = grads(optimizer)
    torch.testing.assert_close(master.float(), fill * 2 + 0.25)
    optimizer.step()
    torch.testing.assert_close(model.weight.float(), (start - fill * 2 - 0.25), rtol=1e-2, atol=1e-1)


# --- overflow and skipped steps --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("where", ["weight", "norm.weight"])
@pytest.mark.parametrize("level", LEVELS)
def test_overflow_skips_the_step_and_backs_off(session, level, where, bad):
    model = mlp()
    where = {"weight": "0.weight", "norm.weight": "1.weight"}[where]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    session.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    for _ in range(2):
        with session.scale_loss(loss_of(model), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
    buffers = [b.clone() for b in model.buffers()]
    before = snapshot(optimizer, model)
    with session.scale_loss(loss_of(model), optimizer) as scaled:
        scaled.backward()
        dict(model.named_parameters())[where].grad.view(-1)[1] = bad
    assert scale_value(session) == 32768.0
    assert optimizer.step() is None
    with torch.no_grad():
        # BatchNorm's running statistics moved in the forward, which is no part of the step.
        for b, old in zip(model.buffers(), buffers, strict=True):
            b.copy_(old)
    assert_unchanged(before, snapshot(optimizer, model))
    assert session.skipped_steps(optimizer) == 1
    optimizer.zero_grad()
    with session.scale_loss(loss_of(model), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert session.skipped_steps(optimizer) == 1
    assert not torch.equal(before[0], snapshot(optimizer, model)[0])


def overflow(session, model, optimizer, **kwargs):
    backward(session, model, optimizer, float("inf"), **kwargs)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_clean_backward_does_not_release_an_overflowed_step(session, level):
    model, optimizer = probe(session, level, n_losses=2)
    before = snapshot(optimizer, model)
    overflow(session, model, optimizer, loss_id=0)
    backward(session, model, optimizer, 1.0, loss_id=1)
    optimizer.step()
    assert_unchanged(before, snapshot(optimizer, model))
    assert (scale_value(session, 0), scale_value(session, 1)) == (START / 2, START)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_two_overflows_before_a_step_skip_one_step_and_halve_twice(session, level):
    model, optimizer = probe(session, level)
    overflow(session, model, optimizer)
    overflow(session, model, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    assert scale_value(session) == START / 4
    assert session.skipped_steps(optimizer) == 1
    backward(session, model, optimizer, 1.0)
    before = snapshot(optimizer, model)
    optimizer.step()
    assert not torch.equal(before[0], snapshot(optimizer, model)[0])


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_only_the_optimizers_of_the_block_are_skipped(session, level):
    models = [Probe() for _ in range(3)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.125) for m in models]
    session.initialize(models, optimizers, opt_level=level, num_losses=2, max_loss_scale=START, verbosity=0)
    inf = sum(m.loss(float("inf")) for m in models[:2])
    with session.scale_loss(inf, optimizers[:2], loss_id=0) as scaled:
        scaled.backward()
    backward(session, models[2], optimizers[2], 1.0, loss_id=1)
    for optimizer in optimizers:
        optimizer.step()
    assert [session.skipped_steps(o) for o in optimizers] == [1, 1, 0]
    assert models[0].weight.eq(2).all()
    assert models[1].weight.eq(2).all()
    assert models[2].weight.eq(1.875).all()


@pytest.mark.parametrize("level", LEVELS)
def test_a_static_scale_is_neither_checked_nor_changed(session, level):
    model, optimizer = probe(session, level, loss_scale=8.0)
    overflow(session, model, optimizer)
    optimizer.step()
    assert session.skipped_steps(optimizer) == 0
    assert not torch.isfinite(model.weight).any()
    assert session.state_dict()["loss_scaler0"] == {"loss_scale": 8.0, "unskipped": 1}


def test_overflow_of_a_plain_backward_is_caught_under_a_dynamic_scale(session):
    model, optimizer = probe(session, "O2")
    before = snapshot(optimizer, model)
    model.loss(float("nan")).backward()
    optimizer.step()
    assert_unchanged(before[:1], snapshot(optimizer, model)[:1])
    assert scale_value(session) == START


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_growth_after_the_window_and_bounds(session, level):
    model, optimizer = probe(session, level, loss_scale="dynamic", min_loss_scale=16384.0, max_loss_scale=131072.0)
    session.load_state_dict({"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 1998}})
    for expected in (65536.0, 131072.0):
        backward(session, model, optimizer, 1e-6)
        assert scale_value(session) == expected
    session.load_state_dict({"loss_scaler0": {"loss_scale": 131072.0, "unskipped": 1999}})
    backward(session, model, optimizer, 1e-6)
    assert scale_value(session) == 131072.0
    optimizer.zero_grad()
    for expected in (65536.0, 32768.0, 16384.0, 16384.0):
        overflow(session, model, optimizer)
        assert scale_value(session) == expected


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_thousand_overflows(session, level):
    model, optimizer = probe(session, level)
    before = snapshot(optimizer, model)
    for _ in range(1000):
        overflow(session, model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    assert scale_value(session) > 0
    assert session.skipped_steps(optimizer) == 1000
    assert_unchanged(before, snapshot(optimizer, model))
    backward(session, model, optimizer, 1.0)
    optimizer.step()
    assert torch.isfinite(model.weight).all()


# --- delays ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_delay_unscale_updates_the_scale_once(session, level):
    model, optimizer = probe(session, level, loss_scale="dynamic")
    for last in (False, False, True):
        backward(session, model, optimizer, 1.0, delay_unscale=not last)
    assert session.state_dict()["loss_scaler0"]["unskipped"] == 1
    assert all(torch.equal(g, torch.full_like(g, 3.0)) for g in grads(optimizer))


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("delay", ["delay_unscale", "delay_overflow_check"])
def test_a_delayed_overflow_is_not_lost(session, level, delay):
    model, optimizer = probe(session, level)
    before = snapshot(optimizer, model)
    overflow(session, model, optimizer, **{delay: True})
    assert scale_value(session) == START
    backward(session, model, optimizer, 1.0)
    assert scale_value(session) == START / 2
    optimizer.step()
    assert_unchanged(before, snapshot(optimizer, model))
    overflow(session, model, optimizer, **{delay: True})
    optimizer.step()
    assert_unchanged(before, snapshot(optimizer, model))
    assert session.skipped_steps(optimizer) == 2


# --- changing parameters ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_a_parameter_unfrozen_later_trains_through_a_master(session, level):
    model = Probe()
    model.weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    session.initialize(model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
    backward(session, model, optimizer, 1.0)
    optimizer.step()
    assert model.weight.eq(2).all()
    model.weight.requires_grad_(True)
    optimizer.zero_grad()
    backward(session, model, optimizer, 1.0)
    optimizer.step()
    assert model.weight.eq(1.875).all()
    if level in ("O2", "O5"):
        assert next(iter(amp.master_params(optimizer))).dtype == torch.float32


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("when", ["before the first backward", "between steps"])
def test_add_param_group(session, level, when):
    model, other = Probe(), Probe()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    session.initialize([model, other], optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    if when == "between steps":
        backward(session, model, optimizer, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.add_param_group({"params": other.parameters(), "lr": 1.0})
    before = model.weight.float().clone()
    with session.scale_loss(model.loss(0.0) + other.loss(1.0), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert other.weight.eq(1.0).all()
    momentum = 0.125 * 0.5 if when == "between steps" else 0.0
    torch.testing.assert_close(model.weight.float(), before - momentum)
    with pytest.raises(TypeError, match="param_group must be a dict"):
        optimizer.add_param_group(list(Probe().parameters()))


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_masters_follow_a_model_that_was_loaded_or_broadcast(session, level):
    model, optimizer = probe(session, level, loss_scale=8.0)
    master = next(iter(amp.master_params(optimizer)))
    with torch.no_grad():
        master.copy_(torch.tensor([2.0001, 2.0, 2.0]))
        model.weight.copy_(torch.tensor([2.0, 5.0, 2.0]))  # what a broadcast from another rank does
    backward(session, model, optimizer, 0.0)
    assert torch.equal(master, torch.tensor([2.0001, 5.0, 2.0]))
    optimizer.step()
    model.load_state_dict({k: v * 0 + 3.0 for k, v in model.state_dict().items()})
    backward(session, model, optimizer, 8.0)
    optimizer.step()
    assert torch.equal(model.weight.float(), torch.full((3,), 2.0))


# --- several optimizers of torch, schedulers, clipping ---------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("before_initialize", [True, False], ids=["scheduler-first", "initialize-first"])
def test_lr_schedulers_see_no_warning_on_a_first_skipped_step(session, level, before_initialize):
    model = Probe()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def schedule():
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = schedule() if before_initialize else None
        session.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", max_loss_scale=START, verbosity=0)
        scheduler = scheduler or schedule()
        overflow(session, model, optimizer)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        backward(session, model, optimizer, 1.0)
        optimizer.step()
        scheduler.step()
    assert model.weight.eq(1.5).all()
    assert optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("clip", [torch.nn.utils.clip_grad_norm_, clip_grad_norm_], ids=["torch", "ampctx"])
def test_clipping_master_params(session, level, clip):
    model, optimizer = probe(session, level, loss_scale=1024.0)
    backward(session, model, optimizer, 2.0)
    norm = clip(amp.master_params(optimizer), 1.0)
    torch.testing.assert_close(norm.float(), torch.tensor(2.0 * 7**0.5), rtol=1e-3, atol=1e-3)
    total = torch.linalg.vector_norm(torch.cat([g.float() for g in grads(optimizer)]))
    torch.testing.assert_close(total, torch.tensor(1.0), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("level", LEVELS)
def test_closures(session, level):
    model, optimizer = probe(session, level)

    def closure():
        optimizer.zero_grad()
        loss = model.loss(1.0)
        with session.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        return loss

    if level in ("O2", "O5"):
        with pytest.raises(AmpError, match="does not support closure use"):
            optimizer.step(closure)
        return
    assert optimizer.step(closure) is not None
    assert model.weight.eq(1.875).all()


def test_an_overflow_inside_a_closure_skips_the_step(session):
    model, optimizer = probe(session, "O1")

    def closure():
        optimizer.zero_grad()
        loss = model.loss(float("inf"))
        with session.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        return loss

    before = snapshot(optimizer, model)
    assert optimizer.step(closure) is None
    assert_unchanged(before, snapshot(optimizer, model))
    assert session.skipped_steps(optimizer) == 1


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adagrad-foreach": lambda p: torch.optim.Adagrad(p, lr=0.05, foreach=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O0", "O2"])
def test_scaling_by_powers_of_two_changes_no_bit(session, level, name):
    """With exact factors the loop must equal the same arithmetic written out by hand."""
    model = mlp()
    session.initialize(model, opt_level=level, verbosity=0)
    by_hand = copy.deepcopy(model)
    masters = [p.detach().float().clone().requires_grad_() for p in by_hand.parameters()]
    reference = OPTIMIZERS[name](masters)
    optimizer = OPTIMIZERS[name](model.parameters())
    other = amp.AmpSession()
    other.allow_incoming_model_not_fp32 = True
    other.initialize(model, optimizer, opt_level="O2", cast_model_type=False, loss_scale=1024.0, verbosity=0)
    for step in range(10):
        optimizer.zero_grad()
        with other.scale_loss(loss_of(model, step), optimizer) as scaled:
            scaled.backward()
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
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.initialize(model, optimizer, opt_level="O0", loss_scale=64.0, verbosity=0)
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


# --- errors and messages ---------------------------------------------------------------------------------------------


def test_errors_of_scale_loss(session):
    with (
        pytest.raises(AmpError, match="Invoked 'with amp.scale_loss'.*has not been initialized"),
        session.scale_loss(torch.ones(()), []),
    ):
        pass
    model, optimizer = probe(session, "O2", n_losses=2)
    with (
        pytest.raises(AmpIndexError, match="loss_id is 2, and num_losses=2"),
        session.scale_loss(model.loss(1.0), optimizer, loss_id=2),
    ):
        pass
    with pytest.raises(AmpTypeError, match="loss must be a tensor, got float"), session.scale_loss(1.0, optimizer):
        pass
    stranger = torch.optim.SGD(Probe().parameters(), lr=0.1)
    with (
        pytest.raises(AmpError, match=r"optimizers\[1\] \(SGD\) did not go through amp.initialize"),
        session.scale_loss(model.loss(1.0), (optimizer, stranger)),
    ):
        pass
    backward(session, model, optimizer, 1.0)


def test_messages_go_to_the_logger_and_are_few(session, caplog):
    model, optimizer = probe(session, "O1")
    session.verbosity = 1
    with caplog.at_level(logging.WARNING, "ampctx"):
        for _ in range(100):
            overflow(session, model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
    texts = [r.getMessage() for r in caplog.records]
    assert texts[0] == "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 2048.0"
    assert texts[1].startswith("A few skipped steps are normal")
    assert sum(t.startswith("A few skipped") for t in texts) == 1
    assert len(texts) < 20
    assert "64 steps have been skipped so far" in texts
    caplog.clear()
    session.verbosity = 0
    overflow(session, model, optimizer)
    optimizer.step()
    assert not caplog.records


# --- what must not go unnoticed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_host_reads(session, level):
    """None in the block and in clipping; one in the step, where a dynamic scale has to decide about it."""
    model, optimizer = probe(session, level, loss_scale="dynamic")
    for _step in range(3):
        loss = model.loss(1.0)
        with HostReads() as reads:
            with session.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            clip_grad_norm_(amp.master_params(optimizer), 1.0)
        assert reads.count == 0
        with HostReads() as reads:
            optimizer.step()
        assert reads.count == 1
        optimizer.zero_grad()


@pytest.mark.parametrize("level", LEVELS)
def test_a_parameter_in_two_optimizers(session, level):
    model = Probe()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.125) for _ in range(2)]
    if level in ("O2", "O5"):
        with pytest.raises(AmpError, match="is in two optimizers"):
            session.initialize(model, optimizers, opt_level=level, verbosity=0)
        assert model.weight.dtype == torch.float32
        assert list(amp.master_params(optimizers[0])) == list(model.parameters())
        return
    session.initialize(model, optimizers, opt_level=level, loss_scale=128.0, verbosity=0)
    for accumulated in (1.0, 2.0):
        with session.scale_loss(model.loss(1.0), optimizers) as scaled:
            scaled.backward()
        assert model.weight.grad.eq(accumulated).all()
    with pytest.raises(MemoryError), session.scale_loss(model.loss(1.0), optimizers) as scaled:
        scaled.backward()
        raise MemoryError
    assert model.weight.grad.eq(2).all()


def test_add_param_group_with_a_parameter_that_has_a_master_elsewhere(session):
    model, other = Probe(), Probe()
    a, b = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other))
    session.initialize([model, other], [a, b], opt_level="O2", verbosity=0)
    with pytest.raises(AmpError, match="is in two optimizers"):
        b.add_param_group({"params": [model.weight]})
    assert len(b.param_groups) == 1


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("where", ["begin", "unscale"])
def test_an_interrupt_between_two_optimizers_of_a_block(session, level, where, monkeypatch):
    models = [Probe(), Probe()]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.125) for m in models]
    session.initialize(models, optimizers, opt_level=level, loss_scale=4.0, verbosity=0)
    second = session._bindings[optimizers[1]].gradients

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(second, {"begin": "begin", "unscale": "_unscale_own"}[where], interrupt)
        with (
            pytest.raises(KeyboardInterrupt),
            session.scale_loss(sum(m.loss(1.0) for m in models), optimizers) as scaled,
        ):
            scaled.backward()
    for optimizer in optimizers:
        optimizer.zero_grad()
    with session.scale_loss(sum(m.loss(1.0) for m in models), optimizers) as scaled:
        scaled.backward()
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.step()
        assert model.weight.eq(1.875).all()


@pytest.mark.parametrize("level", LEVELS)
def test_zero_grad_inside_the_block_clears_what_was_there(session, level):
    model, optimizer = probe(session, level, loss_scale=8.0)
    for _ in range(3):
        with session.scale_loss(model.loss(1.0), optimizer) as scaled:
            optimizer.zero_grad()
            scaled.backward()
    assert all(g.eq(1).all() for g in grads(optimizer))


@pytest.mark.parametrize("level", LEVELS)
def test_zero_grad_ends_a_window(session, level):
    for zero in ("optimizer", "model"):
        model, optimizer = probe(session, level, loss_scale=8.0)
        backward(session, model, optimizer, 1.0, delay_unscale=True)
        (optimizer if zero == "optimizer" else model).zero_grad()
        backward(session, model, optimizer, 0.5)
        assert all(g.eq(0.5).all() for g in grads(optimizer))
        session.reset()


@pytest.mark.parametrize("level", LEVELS)
def test_delayed_gradients_stay_scaled_in_the_model(session, level):
    """So that DistributedDataParallel reduces the sum with the last of them."""
    model, optimizer = probe(session, level, n_losses=2, loss_scale=8.0)
    session.loss_scales[1].set(32.0)
    backward(session, model, optimizer, 1.0)
    backward(session, model, optimizer, 1.0, delay_unscale=True)
    backward(session, model, optimizer, 1.0, delay_unscale=True)
    assert model.weight.grad.eq(16).all()
    backward(session, model, optimizer, 1.0, loss_id=1)
    assert all(g.eq(4).all() for g in grads(optimizer))


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("factor", [1.0, float("inf")])
def test_a_step_right_after_a_delayed_block(session, level, factor):
    model, optimizer = probe(session, level)
    backward(session, model, optimizer, factor, delay_unscale=True)
    optimizer.step()
    assert model.weight.eq(1.875 if factor == 1.0 else 2.0).all()
    assert scale_value(session) == START


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("then", ["step", "reset", "read"])
def test_loaded_weights_count_without_another_block(session, level, then):
    model, optimizer = probe(session, level, loss_scale=8.0)
    backward(session, model, optimizer, 1.0)
    optimizer.step()
    model.load_state_dict({k: torch.zeros_like(v) for k, v in model.state_dict().items()})
    if then == "read":
        assert all(p.eq(0).all() for p in session.master_params(optimizer))
    elif then == "step":
        optimizer.step()
    else:
        session.reset()
    assert model.weight.eq(0).all()


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_unfrozen_and_stepped_without_a_block(session, level):
    model = Probe()
    model.weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    session.initialize(model, optimizer, opt_level=level, verbosity=0)
    model.weight.requires_grad_(True)
    model.loss(1.0).backward()
    optimizer.step()
    assert next(iter(amp.master_params(optimizer))).eq(1.875).all()
    assert next(iter(amp.master_params(optimizer))).dtype == torch.float32


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_scaled_gradients_do_not_reach_an_optimizer_that_the_block_leaves_out(session, level):
    models = [Probe(), Probe()]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.125) for m in models]
    session.initialize(models, optimizers, opt_level=level, loss_scale=128.0, verbosity=0)
    with session.scale_loss(sum(m.loss(1.0) for m in models), optimizers[0]) as scaled:
        scaled.backward()
    for optimizer in optimizers:
        optimizer.step()
    assert models[0].weight.eq(1.875).all()
    assert models[1].weight.eq(2).all()


def test_step_inside_the_block_is_an_error(session):
    model, optimizer = probe(session, "O1")
    with (
        pytest.raises(AmpError, match="inside a scale_loss block"),
        session.scale_loss(model.loss(1.0), optimizer) as scaled,
    ):
        scaled.backward()
        optimizer.step()


@pytest.mark.parametrize("bad", [1, 3], ids=["first-evaluation", "third-evaluation"])
def test_lbfgs_with_an_overflow_in_an_evaluation(session, bad):
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=6)
    session.initialize(model, optimizer, opt_level="O1", verbosity=0)
    evaluations = 0
    overflow_at = None

    def closure():
        nonlocal evaluations
        evaluations += 1
        optimizer.zero_grad()
        loss = loss_of(model) * (float("inf") if evaluations == overflow_at else 1.0)
        with session.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        return loss

    first = float(optimizer.step(closure).detach())
    before = [p.detach().clone() for p in model.parameters()]
    state = copy.deepcopy(next(iter(optimizer.state.values())))
    overflow_at = evaluations + bad
    assert optimizer.step(closure) is None
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert next(iter(optimizer.state.values())).keys() == state.keys()
    overflow_at = None
    assert float(optimizer.step(closure).detach()) < first


@pytest.mark.parametrize("level", LEVELS)
def test_state_from_before_initialize_follows_the_weights(session, level):
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)
    loss_of(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    session.initialize(model, optimizer, opt_level=level, loss_scale=1.0, verbosity=0)
    with session.scale_loss(loss_of(model), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    session.reset()
    loss_of(model).backward()
    optimizer.step()
    assert all(torch.isfinite(p).all() for p in model.parameters())
