"""Optimizers that programs derive from apex's, with a step of their own over apex's kernels."""

import copy
from functools import partial

import amp_C
import pytest
import torch
from apex.amp import _amp_state
from apex.multi_tensor_apply import multi_tensor_applier
from apex.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedMixedPrecisionLamb, FusedNovoGrad, FusedSGD
from kit import start, train
from torch import nn

from ampctx import amp

KERNELS = {
    FusedAdam: ["multi_tensor_adam", "multi_tensor_adam_capturable", "multi_tensor_adam_capturable_master"],
    FusedSGD: ["multi_tensor_sgd"],
    FusedLAMB: ["multi_tensor_l2norm", "multi_tensor_lamb"],
    FusedMixedPrecisionLamb: ["multi_tensor_l2norm", "multi_tensor_lamb"],
    FusedNovoGrad: ["multi_tensor_novograd"],
    FusedAdagrad: ["multi_tensor_adagrad"],
}


class OwnStep(FusedAdam):
    """Steps fp32 copies, as fairseq's optimizer for memory-efficient fp16 does."""

    def step(self, closure=None, scale=1.0):
        loss = None if closure is None else closure()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            stepped = [p for p in group["params"] if p.grad is not None]
            for p in stepped:
                for name in ("exp_avg", "exp_avg_sq"):
                    self.state[p].setdefault(name, torch.zeros_like(p, dtype=torch.float32))
            wide = [p.detach().clone().float() for p in stepped]
            states = [[self.state[p][name] for p in stepped] for name in ("exp_avg", "exp_avg_sq")]
            lists = [[p.grad.float() / scale for p in stepped], wide, *states]
            numbers = (group["lr"], *group["betas"], group["eps"], group["step"], self.adam_w_mode)
            more = (int(group["bias_correction"]), group["weight_decay"])
            multi_tensor_applier(self.multi_tensor_adam, self._dummy_overflow_buf, lists, *numbers, *more)
            with torch.no_grad():
                for p, new in zip(stepped, wide, strict=True):
                    p.copy_(new)
        return loss


class BaseStep(FusedAdam):
    """Does something around the step of its base."""

    def step(self, closure=None):
        self.steps = getattr(self, "steps", 0) + 1
        return super().step(closure)


@pytest.mark.parametrize("kind", KERNELS, ids=lambda kind: kind.__name__)
def test_kernels_are_those_of_amp_C(kind):
    optimizer = kind([nn.Parameter(torch.ones(2))], lr=0.1)
    for name in KERNELS[kind]:
        of_amp_C = f"{name}_mp" if kind is FusedMixedPrecisionLamb else name
        assert getattr(optimizer, name) is getattr(amp_C, of_amp_C)
        assert name not in vars(optimizer)


@pytest.mark.parametrize("kind", KERNELS, ids=lambda kind: kind.__name__)
def test_each_optimizer_has_a_flag_of_its_own(kind):
    optimizer = kind([nn.Parameter(torch.ones(2))], lr=0.1)
    buffer = optimizer._dummy_overflow_buf
    assert (buffer.dtype, buffer.tolist(), buffer.device.type) == (torch.int32, [0], "cpu")
    assert optimizer._dummy_overflow_buf is buffer
    assert copy.deepcopy(optimizer)._dummy_overflow_buf is not buffer
    assert kind([{"params": []}], lr=1.0)._dummy_overflow_buf.tolist() == [0]


def test_what_a_program_writes_into_the_flag_stops_no_step():
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.full((2,), torch.inf)
    optimizer = FusedLAMB([p], lr=0.1)
    multi_tensor_applier(optimizer.multi_tensor_l2norm, optimizer._dummy_overflow_buf, [[p.grad]], False)
    assert optimizer._dummy_overflow_buf.item() == 1
    p.grad = torch.ones(2)
    optimizer.step()
    assert not p.detach().eq(1.0).any()


def trained(kind, level, overflow_at):
    make = partial(kind, lr=0.1, weight_decay=0.01)
    model, optimizer = start(amp, level, make, loss_scale="dynamic", max_loss_scale=1024.0)
    train(amp, model, optimizer, 8, overflow_at=(overflow_at,))
    scale = _amp_state.loss_scalers[0].loss_scale()
    result = [p.detach().clone() for p in amp.master_params(optimizer)], [p.detach() for p in model.parameters()], scale
    amp.reset()
    return result


@pytest.mark.parametrize("overflow_at", [None, 0, 5])
@pytest.mark.parametrize("kind", [OwnStep, BaseStep])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_amp_trains_and_skips_as_with_the_class_itself(level, kind, overflow_at):
    masters, weights, scale = trained(kind, level, overflow_at)
    wanted_masters, wanted_weights, wanted_scale = trained(FusedAdam, level, overflow_at)
    assert scale == wanted_scale == (1024.0 if overflow_at is None else 512.0)
    torch.testing.assert_close(masters, wanted_masters)
    torch.testing.assert_close(weights, wanted_weights)
    assert all(p.isfinite().all() for p in masters)


@pytest.mark.large
def test_a_tensor_of_more_than_2_to_the_31_elements():
    """28 GB."""
    p = nn.Parameter(torch.ones(2359332864, dtype=torch.float16))
    p.grad = torch.ones_like(p)
    FusedAdam([p], lr=0.5).step()
    # The first step is lr times the sign of the gradient.
    assert (p == 0.5).all()
