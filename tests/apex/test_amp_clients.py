"""What clients of apex did with its private names in their training loops."""

import contextlib

import apex_C
import pytest
import torch
from amp_C import multi_tensor_scale
from amp_models import BOTH, backward, probe, same, weights
from apex import amp
from apex.amp import _amp_state
from kit import INF, OPTIMIZERS, Probe, loss_of, probes, start

import ampctx

both = pytest.mark.parametrize("make", BOTH)
each_kind = pytest.mark.parametrize("level", ["O1", "O2"])

# --- all-reduce after accumulation, as in the BERT examples -----------------------------------------------------------


def take_optimizer_step(model, optimizer, overflow_buf, from_other_rank, accumulation, misspelt):
    """Reduces the unscaled master gradients with the loss scale on, asks the scaler, then steps or drops them.

    ``from_other_rank``: the gradient that the other rank sends, for each element, scaled as this rank's is.
    """
    scaler = _amp_state.loss_scalers[0]
    loss_scale = scaler.loss_scale()
    master_grads = [p.grad for p in amp.master_params(optimizer) if p.grad is not None]
    flat = torch.empty(sum(g.numel() for g in master_grads), dtype=torch.float16)
    views = apex_C.unflatten(flat, master_grads)
    overflow_buf.zero_()
    multi_tensor_scale(65536, overflow_buf, [master_grads, views], loss_scale / (2 * accumulation))
    flat += from_other_rank * loss_scale / (2 * accumulation)
    overflow_buf.zero_()
    multi_tensor_scale(65536, overflow_buf, [views, master_grads], 1.0 / loss_scale)
    old_overflow_buf = scaler._overflow_buf
    scaler._overflow_buf = overflow_buf
    had_overflow = scaler.update_scale()
    if misspelt:
        scaler._overfloat_buf = old_overflow_buf
    else:
        scaler._overflow_buf = old_overflow_buf
    if had_overflow == 0:
        optimizer.step()
    elif _amp_state.opt_properties.master_weights:
        for param in optimizer._amp_stash.all_fp32_from_fp16_params:
            param.grad = None
    for param in model.parameters():
        param.grad = None
    return had_overflow


@pytest.mark.parametrize("misspelt", [True, False], ids=["buffer stays", "buffer put back"])
@pytest.mark.parametrize("accumulation", [1, 3])
@both
@each_kind
def test_all_reduce_after_accumulation(level, make, accumulation, misspelt):
    """Overflow here, in an earlier micro-batch here, on the other rank alone, nowhere: every step and scale."""
    start = 256.0
    model, optimizer = probe(level, make, max_loss_scale=start * 2)
    twin = Probe()  # stepped by hand in fp32 with the mean over micro-batches and ranks
    reference = OPTIMIZERS[make](twin.parameters())
    scaler = _amp_state.loss_scalers[0]
    scaler._loss_scale, scaler._scale_seq_len = start, 3
    buffer, scale, clean = torch.tensor([0], dtype=torch.int32), start, 0
    schedule = "clean here clean other clean clean clean first here other clean clean"
    for i, what in enumerate(schedule.split()):
        factor = 1.0 + i % 3
        bad_here = {"here": accumulation - 1, "first": 0}.get(what)
        for micro in range(accumulation):
            backward(model, optimizer, INF if micro == bad_here else factor, delay_overflow_check=True)
        assert scaler.loss_scale() == scale
        before = weights(optimizer)
        from_other = INF if what == "other" else factor * accumulation
        overflow = take_optimizer_step(model, optimizer, buffer, from_other, accumulation, misspelt)
        assert overflow is (what != "clean"), (i, what)
        if overflow:
            assert same(weights(optimizer), before), (i, what)
            scale, clean = scale / 2, 0
        else:
            for p in twin.parameters():
                p.grad = torch.full_like(p, factor)
            reference.step()
            clean += 1
            if clean == 3:
                scale, clean = min(scale * 2, start * 2), 0
            assert same(weights(optimizer), weights(reference)), (i, what)
        assert (scaler.loss_scale(), scaler._unskipped) == (scale, clean), (i, what)
    assert ampctx.amp.skipped_steps(optimizer) == 0  # the caller did that


# --- copies of scale_loss ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def by_hand(loss, optimizers, loss_id=0, delay_unscale=False, delay_overflow_check=False):
    """A client's own ``scale_loss`` over the private names."""
    if not isinstance(optimizers, list):
        optimizers = [optimizers]
    scaler = _amp_state.loss_scalers[loss_id]
    scale = scaler.loss_scale()
    if not delay_unscale:
        for optimizer in optimizers:
            if not optimizer._amp_stash.params_have_scaled_gradients:
                optimizer._prepare_amp_backward()
    yield loss.float() * scale
    if delay_unscale:
        for optimizer in optimizers:
            optimizer._amp_stash.params_have_scaled_gradients = True
        return
    scaler.clear_overflow_state()
    for optimizer in optimizers:
        optimizer._post_amp_backward(scaler)
        optimizer._amp_stash.params_have_scaled_gradients = False
    should_skip = False if delay_overflow_check else scaler.update_scale()
    if should_skip:
        for optimizer in optimizers:
            if not optimizer._amp_stash.already_patched:
                _patch_step(optimizer)


def _patch_step(optimizer):
    original = optimizer.step

    def skip_step(closure=None):
        if hasattr(optimizer._amp_stash, "all_fp32_from_fp16_params"):
            for param in optimizer._amp_stash.all_fp32_from_fp16_params:
                param.grad = None
        optimizer.step = original
        optimizer._amp_stash.already_patched = False

    optimizer.step = skip_step
    optimizer._amp_stash.already_patched = True


# Iteration and micro-batch: the last one, alone, and two at once.
OVERFLOWS = frozenset({(2, 0), (5, 0), (5, 1), (8, 2)})


def trace_of(scale_loss, level, make, kind, overflows, scale):
    """The scale, the gradients and the weights of every iteration."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    model, optimizer = start(amp, level, make, model, loss_scale=scale, max_loss_scale=1024.0)
    scaler, trace = _amp_state.loss_scalers[0], []
    scaler._scale_seq_len = 4
    micro = {"plain": [{}], "accumulate": [{}] * 3, "delay": [{"delay_unscale": True}] * 2 + [{}]}[kind]
    for i in range(10):
        for j, delay in enumerate(micro):
            loss = loss_of(model, 10 * i + j) * (INF if (i, j) in overflows else 1.0)
            with scale_loss(loss, optimizer, **delay) as scaled:
                scaled.backward()
        grads = [p.grad for p in amp.master_params(optimizer)]
        trace.append([torch.tensor(scaler.loss_scale()), *(torch.zeros(()) if g is None else g.clone() for g in grads)])
        optimizer.step()
        optimizer.zero_grad()
        trace[-1] += [*weights(optimizer), *(p.detach().clone() for p in model.parameters())]
    ampctx.amp.reset()
    return trace


@pytest.mark.full(but=24)
@pytest.mark.parametrize("kind", ["plain", "accumulate", "delay"])
@both
@pytest.mark.parametrize("scale", ["dynamic", 128.0, 1.0])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O5"])
def test_a_loop_by_hand_equals_scale_loss(level, scale, make, kind):
    """Bit for bit: scales, gradients, weights; with overflows of a dynamic scale."""
    overflows = OVERFLOWS if scale == "dynamic" else ()
    ours, theirs = (trace_of(how, level, make, kind, overflows, scale) for how in (amp.scale_loss, by_hand))
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        for x, y in zip(a, b, strict=True):
            assert x.dtype == y.dtype
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True, msg=lambda m, i=i: f"iteration {i}: {m}")
    assert (len({t[0].item() for t in ours}) > 1) == (scale == "dynamic")


@each_kind
def test_a_loop_by_hand_over_two_optimizers(level):
    """An overflow in one of them skips both."""
    models, optimizers = probes(amp, level, max_loss_scale=64.0)
    before = [weights(o) for o in optimizers]
    for skips, factors in [(True, (1.0, INF)), (True, (INF, 1.0)), (False, (1.0, 2.0))]:
        with by_hand(models[0].loss(factors[0]) + models[1].loss(factors[1]), optimizers) as scaled:
            scaled.backward()
        for optimizer, was in zip(optimizers, before, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            assert same(weights(optimizer), was) is skips
    assert _amp_state.loss_scalers[0].loss_scale() == 16.0


@each_kind
def test_a_scaler_of_the_clients_own(level):
    """Not one of the session: the gradients are its, and so is the flag."""
    model, optimizer = probe(level)
    mine = amp.scaler.LossScaler("dynamic", init_scale=16.0)
    for factor, had in [(1.0, False), (INF, True), (1.0, False)]:
        optimizer._prepare_amp_backward()
        (model.loss(factor) * mine.loss_scale()).backward()
        mine.clear_overflow_state()
        optimizer._post_amp_backward(mine)
        assert mine.update_scale() is had
        if had:
            for p in amp.master_params(optimizer):
                p.grad = None
        else:
            assert {g for p in amp.master_params(optimizer) for g in p.grad.tolist()} == {1.0}
            before = weights(optimizer)
            optimizer.step()
            assert not same(weights(optimizer), before)
        optimizer.zero_grad()
    assert (mine.loss_scale(), _amp_state.loss_scalers[0].loss_scale()) == (8.0, 4096.0)


# --- smaller habits ---------------------------------------------------------------------------------------------------


def test_clear_cache_in_an_evaluation_loop():
    model, _ = start(amp, "O1")
    with torch.no_grad():
        first = model.eval()(torch.ones(2, 4))
        for p in model.parameters():
            p.add_(1.0)
        _amp_state.handle._clear_cache()
        assert not torch.equal(model(torch.ones(2, 4)), first)
