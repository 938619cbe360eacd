"""The same training under torch's GradScaler and ours: weights, scale and growth tracker agree to the last bit."""

import functools

import pytest
import torch
from kit import OPTIMIZERS, no_host_sync
from torch import nn

from ampctx import GradScaler, clip_grad_norm_

ITERATIONS = 140
OVERFLOWS = {0, 1, 17, 50, 51, 52, 133, 139}

NAMES = ("SGD-plain", "SGD-fused", "Adam-plain", "Adam-foreach", "Adam-fused", "AdamW-fused")


def make_of(name):
    # No momentum: torch 2.13 leaves the buffer uninitialised when the very first fused step overflows.
    options = {"momentum": 0.0} if name == "SGD-fused" else {"lr": 0.05} if name == "SGD-plain" else {}
    return functools.partial(OPTIMIZERS[name], **options)


class Training:
    """Two small models with an optimizer each, and the gradients' overflows at set iterations."""

    def __init__(self, scaler, make_optimizer, device):
        torch.manual_seed(0)
        self.scaler = scaler
        self.models = [
            nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(device),
            nn.Sequential(nn.Linear(2, 5), nn.Linear(5, 1)).to(device),
        ]
        self.optimizers = [make_optimizer(model.parameters()) for model in self.models]
        self.inputs = torch.randn(ITERATIONS, 6, 4).to(device)
        self.history = []

    def loss(self, i):
        return self.models[0](self.inputs[i]).square().mean()

    def losses(self, i):
        hidden = self.models[0](self.inputs[i])
        return hidden.square().mean() + 1, self.models[1](hidden).abs().mean()

    def overflow(self, i, model=0, where=None):
        if i in (OVERFLOWS if where is None else where):
            list(self.models[model].parameters())[i % 4].grad.view(-1)[-1] = (torch.inf, torch.nan, -torch.inf)[i % 3]

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def record(self):
        weights = [p.detach().clone() for model in self.models for p in model.parameters()]
        self.history.append((self.scaler.get_scale(), self.scaler._get_growth_tracker(), weights))


def plain(t, i):
    t.zero_grad()
    t.scaler.scale(t.loss(i)).backward()
    t.overflow(i)
    t.scaler.step(t.optimizers[0])
    t.scaler.update()


def unscale_then_clip(t, i):
    t.zero_grad()
    t.scaler.scale(t.loss(i)).backward()
    if t.scaler.is_enabled():
        t.overflow(i)
    t.scaler.unscale_(t.optimizers[0])
    torch.nn.utils.clip_grad_norm_(t.models[0].parameters(), 0.1)
    t.scaler.step(t.optimizers[0])
    t.scaler.update()


def accumulation(t, i):
    t.scaler.scale(t.loss(i) / 4).backward()
    t.overflow(i, where={3, 50, 51, 133})
    if i % 4 == 3:
        t.scaler.step(t.optimizers[0])
        t.scaler.update()
        t.zero_grad()


def gradient_penalty(t, i):
    t.zero_grad()
    parameters = list(t.models[0].parameters())
    scaled = torch.autograd.grad(t.scaler.scale(t.loss(i)), parameters, create_graph=True)
    norm = sum((grad / t.scaler.get_scale()).square().sum() for grad in scaled).sqrt()
    t.scaler.scale(t.loss(i) + 0.1 * norm).backward()
    t.overflow(i)
    t.scaler.step(t.optimizers[0])
    t.scaler.update()


def two_losses_two_optimizers(t, i):
    t.zero_grad()
    loss0, loss1 = t.losses(i)
    t.scaler.scale(loss0).backward(retain_graph=True)
    t.scaler.scale(loss1).backward()
    t.overflow(i)
    t.overflow(i, model=1, where={1, 18, 19, 133})
    if i % 3:
        t.scaler.unscale_(t.optimizers[0])
    t.scaler.step(t.optimizers[0])
    t.scaler.step(t.optimizers[1])
    t.scaler.update()


def list_of_losses(t, i):
    t.zero_grad()
    scaled = t.scaler.scale([*t.losses(i)])
    torch.autograd.backward(scaled)
    t.overflow(i)
    for optimizer in t.optimizers:
        t.scaler.step(optimizer)
    t.scaler.update()


def scale_set_by_hand(t, i):
    t.zero_grad()
    t.scaler.scale(t.loss(i)).backward()
    t.overflow(i)
    t.scaler.step(t.optimizers[0])
    if i % 20 == 7:
        t.scaler.update(float(2 ** (i % 13)))
    elif i % 20 == 8:
        t.scaler.update(torch.tensor(384.0))
    else:
        t.scaler.update()


def factors_set_by_hand(t, i):
    if i == 40:
        t.scaler.set_growth_factor(4.0)
        t.scaler.set_backoff_factor(0.25)
        t.scaler.set_growth_interval(3)
    plain(t, i)


PATTERNS = [
    plain,
    unscale_then_clip,
    accumulation,
    gradient_penalty,
    two_losses_two_optimizers,
    list_of_losses,
    scale_set_by_hand,
    factors_set_by_hand,
]


def trained(make_scaler, make_optimizer, pattern, device="cpu"):
    training = Training(make_scaler(), make_optimizer, device)
    for i in range(ITERATIONS):
        pattern(training, i)
        training.record()
    return training


def assert_same_history(ours, theirs):
    for i, (mine, other) in enumerate(zip(ours.history, theirs.history, strict=True)):
        assert mine[:2] == other[:2], f"scale and growth tracker after iteration {i}"
        for a, b in zip(mine[2], other[2], strict=True):
            assert torch.equal(a, b), f"weights after iteration {i}"
            assert torch.isfinite(a).all()


def scalers(device="cpu", **kwargs):
    kwargs = {"growth_interval": 5, "init_scale": 1024.0, **kwargs}
    return (lambda: GradScaler(device, **kwargs)), (lambda: torch.amp.GradScaler(device, **kwargs))


@pytest.mark.full(but=8)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda p: p.__name__)
def test_training_is_torchs_to_the_last_bit(pattern, name):
    ours, theirs = (trained(make, make_of(name), pattern) for make in scalers())
    assert_same_history(ours, theirs)
    assert len({scale for scale, _, _ in ours.history}) > 3
    assert not torch.equal(ours.history[0][2][0], ours.history[-1][2][0])


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["SGD-plain", "Adam-foreach", "Adam-fused"])
@pytest.mark.parametrize("pattern", [plain, accumulation, two_losses_two_optimizers], ids=lambda p: p.__name__)
def test_training_on_cuda_is_torchs_to_the_last_bit(pattern, name):
    ours, theirs = (trained(make, make_of(name), pattern, "cuda") for make in scalers("cuda"))
    assert_same_history(ours, theirs)


@pytest.mark.cuda
@pytest.mark.parametrize("clip", [False, True], ids=["plain", "clipped"])
def test_an_iteration_on_cuda_waits_for_nothing(clip):
    make_ours, _ = scalers("cuda")
    t = Training(make_ours(), make_of("Adam-fused"), "cuda")
    plain(t, 0)
    t.zero_grad()
    loss = t.scaler.scale(t.loss(2))
    loss.backward()
    with no_host_sync():
        if clip:
            t.scaler.unscale_(t.optimizers[0])
            clip_grad_norm_(t.models[0].parameters(), 0.1)
        t.scaler.step(t.optimizers[0])
        t.scaler.update()


@pytest.mark.parametrize("name", ["SGD-plain", "Adam-fused"])
def test_uneven_scales_agree_too(name):
    ours, theirs = (
        trained(make, make_of(name), plain)
        for make in scalers(init_scale=1000.1, growth_factor=1.3, backoff_factor=0.7, growth_interval=2)
    )
    assert_same_history(ours, theirs)


@pytest.mark.parametrize("name", ["SGD-plain", "Adam-plain", "Adam-fused"])
def test_states_cross_over_mid_run(name):
    make_ours, make_theirs = scalers()

    def swapping(t, i):
        if i and i % 10 == 3:
            other = make_theirs() if isinstance(t.scaler, GradScaler) else make_ours()
            other.load_state_dict(t.scaler.state_dict())
            t.scaler = other
        plain(t, i)

    assert_same_history(trained(make_ours, make_of(name), swapping), trained(make_theirs, make_of(name), plain))
