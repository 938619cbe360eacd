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
from processes import output
from torch import nn

from ampctx import amp, optimizers
from ampctx.weights.step import takes_step

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


@pytest.mark.full
def test_the_classes_are_those_of_ampctx_with_and_without_kernels():
    """apex.optimizers adds the kernels, and uninstall_apex removes them."""
    assert FusedAdam is optimizers.FusedAdam
    program = """
from ampctx import optimizers
from ampctx_apex import install_apex, uninstall_apex
install_apex()
names = [(optimizers.FusedAdam, "multi_tensor_adam"), (optimizers.FusedLAMB, "_dummy_overflow_buf")]
before = [hasattr(*name) for name in names]
import apex.optimizers
after = [hasattr(*name) for name in names]
uninstall_apex()
print(before, after, [hasattr(*name) for name in names])
"""
    assert output("-c", program) == "[False, False] [True, True] [False, False]\n"


def test_a_copy_and_a_pickle_have_the_kernels(tmp_path):
    optimizer = OwnStep([nn.Parameter(torch.ones(2))])
    torch.save(optimizer, tmp_path / "optimizer.pt")
    loaded = torch.load(tmp_path / "optimizer.pt", weights_only=False)
    assert loaded.multi_tensor_adam is amp_C.multi_tensor_adam


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


@pytest.mark.parametrize("kind", [OwnStep, BaseStep])
def test_torchs_grad_scaler_unscales_and_skips(kind):
    def scaled(kind):
        p = nn.Parameter(torch.tensor([1.0, -2.0]))
        optimizer, scaler = kind([p], lr=0.1), torch.amp.GradScaler("cpu", init_scale=64.0)
        for factor in (1.0, torch.inf, 1.0):
            optimizer.zero_grad()
            scaler.scale((p * factor).square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        return p.detach(), scaler.get_scale()

    ours, scale = scaled(kind)
    wanted, wanted_scale = scaled(FusedAdam)
    torch.testing.assert_close(ours, wanted)
    assert scale == wanted_scale == 32.0


def test_a_class_may_take_what_amp_gives_a_step():
    class Takes(BaseStep):
        def step(self, closure=None, *, given=None):
            return FusedAdam.step(self, closure, given=given)

    params = [nn.Parameter(torch.ones(1))]
    assert [takes_step(kind(params)) for kind in (FusedAdam, Takes, BaseStep, OwnStep)] == [True, True, False, False]
    assert FusedAdam._step_supports_amp_scaling
    assert Takes._step_supports_amp_scaling
    assert not BaseStep._step_supports_amp_scaling


@pytest.mark.large
def test_a_tensor_of_more_than_2_to_the_31_elements():
    """28 GB."""
    p = nn.Parameter(torch.ones(2359332864, dtype=torch.float16))
    p.grad = torch.ones_like(p)
    FusedAdam([p], lr=0.5).step()
    # The first step is lr times the sign of the gradient.
    assert (p == 0.5).all()
