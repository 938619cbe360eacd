"""What a fused step does besides stepping: it clips by the norm of the block's check, and counts itself as skipped."""

import functools

import pytest
import torch
from host_reads import OpCalls
from kit import INF, loss_of, start
from torch import nn

from ampctx import AmpTypeError, clip_grad_norm_, optimizers
from ampctx.amp import AmpSession


def plain_mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def weights_of(model):
    return [p.detach().clone() for p in model.parameters()]


def begin(session, level, make=optimizers.FusedAdam, **options):
    model = plain_mlp()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.02}]
    return start(session, level, lambda _: make(groups, lr=0.01), model, **options)


def block(session, model, optimizer, bad=False, without_last=False, **options):
    with session.scale_loss(loss_of(model), optimizer, **options) as scaled:
        scaled.backward()
        if bad:
            next(model.parameters()).grad.view(-1)[0] = INF
        if without_last:
            model[2].bias.grad = None


@pytest.mark.parametrize("make", [optimizers.FusedAdam, optimizers.FusedLAMB], ids=lambda m: m.__name__)
@pytest.mark.parametrize("scale", ["dynamic", 1024.0])
@pytest.mark.parametrize("change", ["nothing", "norm", "read"])
def test_a_norm_that_code_changes_clips_as_it_was(make, scale, change):
    """Such as an all_reduce of it in place, for a log."""
    weights = []
    for max_norms in ([0.01], [0.05, 0.01], [0.05, 0.03, 0.01]):
        for now in ("nothing", change):
            session = AmpSession()
            model, optimizer = begin(session, "O2", make, loss_scale=scale)
            for _ in range(3):
                block(session, model, optimizer)
                for max_norm in max_norms:
                    norm = clip_grad_norm_(session.master_params(optimizer), max_norm)
                    if now == "norm":
                        norm.mul_(100)
                    elif now == "read":
                        norm.zero_()
                        assert all(p.grad.norm() < 1.01 * max_norm for p in session.master_params(optimizer))
                optimizer.step()
                optimizer.zero_grad()
            weights.append(weights_of(model))
            session.reset()
    for changed, plain in zip(weights[1::2], weights[::2], strict=True):
        assert not torch.equal(changed[0], next(plain_mlp().half().parameters()))
        torch.testing.assert_close(changed, plain, rtol=1e-3 if change == "read" else 0, atol=0)


class Twice(optimizers.FusedAdam):
    """A program's own optimizer, which steps in halves."""

    def step(self, closure=None, *, given=None):
        rate = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] = group["lr"] / 2
        super().step(given=given)
        super().step(given=given)
        for group, lr in zip(self.param_groups, rate, strict=True):
            group["lr"] = lr


class Never(optimizers.FusedAdam):
    def step(self, closure=None, *, given=None):
        pass


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("make", [optimizers.FusedAdam, optimizers.FusedLAMB, Twice, Never], ids=lambda m: m.__name__)
def test_each_step_is_counted_once(session, level, make):
    model, optimizer = begin(session, level, make)
    for i, bad in enumerate([True, False, True, True, False]):
        block(session, model, optimizer, bad)
        with OpCalls() as calls:
            optimizer.step()
        assert calls.of["count_skip"] == (make is Never)
        optimizer.zero_grad()
        assert session.skipped_steps(optimizer) == [1, 1, 2, 3, 3][i]


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("make", [optimizers.FusedAdam, optimizers.FusedLAMB], ids=lambda m: m.__name__)
def test_a_skipped_step_of_other_gradients_than_the_last_is_counted(session, level, make):
    model, optimizer = begin(session, level, make)
    for bad in (False, False, True):
        block(session, model, optimizer, bad, without_last=bad)
        optimizer.step()
        optimizer.zero_grad()
    assert session.skipped_steps(optimizer) == 1


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_that_raised_and_is_tried_again_counts_once(session, level):
    model, optimizer = begin(session, level)
    for times in (1, 2):
        block(session, model, optimizer, bad=True)
        rate, optimizer.param_groups[1]["lr"] = optimizer.param_groups[1]["lr"], "fast"
        with pytest.raises(AmpTypeError, match="lr must be a number"):
            optimizer.step()
        optimizer.param_groups[1]["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        assert session.skipped_steps(optimizer) == times


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_without_gradients_amp_counts(session, level):
    """A step that calls no op. Its block had an overflow in a parameter that another optimizer steps."""
    model, optimizer = begin(session, level)
    block(session, model, optimizer, bad=True)
    optimizer.zero_grad()
    block(session, model, optimizer, bad=True)
    optimizer.step()
    assert session.skipped_steps(optimizer) == 1


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_flag_of_the_program_is_counted_by_amp(session, level):
    model, optimizer = begin(session, level)
    for flag in (1.0, 0.0):
        block(session, model, optimizer)
        optimizer.found_inf = torch.tensor(flag)
        with OpCalls() as calls:
            optimizer.step()
        del optimizer.found_inf
        assert calls.of["count_skip"] == 1
    assert session.skipped_steps(optimizer) == 1


@pytest.mark.parametrize("make", [optimizers.FusedAdam, functools.partial(torch.optim.Adam, fused=True)])
def test_a_hook_that_zeroes_gradients_at_the_end_of_a_step_leaves_its_record(session, make):
    model, optimizer = begin(session, "O2", make, loss_scale="dynamic")
    optimizer.register_step_post_hook(lambda optimizer, *_: optimizer.zero_grad())
    for i in range(4):
        block(session, model, optimizer, bad=i % 2 == 1)
        optimizer.step()
        assert session.outcome(optimizer).skipped is (i % 2 == 1)
    assert session.skipped_steps(optimizer) == 2
