"""timm: ``ApexScaler`` in the loop of its training script, with its models, optimizers, clipping and checkpoints."""

import pytest
import timm
import torch
from apex import amp
from apex.optimizers import FusedAdam
from timm.layers import fast_norm as fast_norm_module
from timm.layers import set_fast_norm
from timm.models import model_parameters, resume_checkpoint
from timm.optim import create_optimizer_v2, param_groups_weight_decay
from timm.utils import ApexScaler, CheckpointSaver, dispatch_clip_grad
from timm.utils.cuda import has_apex
from torch import nn
from training import FIRST_SCALE, assert_same_weights, on_levels, scale, weights

from ampctx import amp as library_amp

MODELS = ("test_vit", "test_efficientnet")


def images(count, overflow_at=None):
    """Batches of one of three stripes, with noise."""
    generator = torch.Generator().manual_seed(0)
    result = []
    for i in range(count):
        labels = torch.randint(0, 3, (8,), generator=generator)
        x = torch.randn(8, 3, 32, 32, generator=generator) * 0.1
        x[torch.arange(8), :, labels * 8] += 1.0
        if i == overflow_at:
            x[0] = torch.inf
        result.append((x, labels))
    return result


def vision_model(name):
    torch.manual_seed(0)
    options = {"img_size": 32} if "vit" in name else {}
    return timm.create_model(name, num_classes=3, **options)


def optimizer_for(model, opt="sgd"):
    """timm's factory; its names for apex's optimizers want a GPU, so those get their class and timm's param groups."""
    if isinstance(opt, str):
        return create_optimizer_v2(model, opt=opt, lr=0.002, weight_decay=0.01)
    return opt(param_groups_weight_decay(model, 0.01), lr=0.002)


def initialized(name, level, opt="sgd", **options):
    model = vision_model(name)
    return amp.initialize(model, optimizer_for(model, opt), opt_level=level, verbosity=0, **options)


def train_as_timm(model, optimizer, data, scaler, clip_grad, accumulate=1):
    """The part of timm's training script that deals with amp, in its order."""
    model.train()
    losses = []
    for i, (x, y) in enumerate(data, 1):
        loss = nn.functional.cross_entropy(model(x), y)
        losses.append(loss.item())
        need_update = i % accumulate == 0
        scaler(
            loss / accumulate,
            optimizer,
            clip_grad=clip_grad,
            clip_mode="norm",
            parameters=model_parameters(model),
            create_graph=False,
            need_update=need_update,
        )
        if need_update:
            optimizer.zero_grad()
    return losses


class Plain:
    """In the scaler's place: without mixed precision."""

    def __call__(self, loss, optimizer, clip_grad, clip_mode, parameters, create_graph, need_update):
        loss.backward()
        if need_update:
            # Of all that the optimizer steps, as by ApexScaler.
            dispatch_clip_grad(amp.master_params(optimizer), clip_grad, mode=clip_mode)
            optimizer.step()


def test_timm_finds_apex():
    assert has_apex


def flat(tensors):
    return torch.cat([t.detach().float().flatten() for t in tensors])


def distance_from_fp32(name, level, steps, clip_grad, accumulate=1, scaler=None):
    """How far mixed precision ends from fp32, as a fraction of the way that training goes."""
    plain = vision_model(name)
    plain_optimizer = optimizer_for(plain)
    start = flat(amp.master_params(plain_optimizer))
    train_as_timm(plain, plain_optimizer, images(steps), Plain(), clip_grad, accumulate)
    model, optimizer = initialized(name, level, loss_scale=1024.0)
    train_as_timm(model, optimizer, images(steps), scaler or ApexScaler(), clip_grad, accumulate)
    end = flat(amp.master_params(plain_optimizer))
    return ((flat(amp.master_params(optimizer)) - end).norm() / (end - start).norm()).item()


@on_levels
@pytest.mark.parametrize("name", MODELS)
def test_training_follows_fp32(name, level):
    assert distance_from_fp32(name, level, steps=6, clip_grad=1.0) < 0.02


@pytest.fixture
def fast_norm():
    """timm's switch for apex's normalization."""
    set_fast_norm(True)
    yield
    set_fast_norm(False)


@pytest.mark.usefixtures("fast_norm")
@on_levels
def test_training_with_apex_layer_norm_follows_fp32(level):
    assert fast_norm_module.has_apex
    assert all(m._fast_norm for m in vision_model("test_vit").modules() if isinstance(m, nn.LayerNorm))
    assert distance_from_fp32("test_vit", level, steps=3, clip_grad=1.0) < 0.005


@on_levels
@pytest.mark.parametrize("opt", ["sgd", FusedAdam], ids=["host-skips", "device-skips"])
def test_an_overflow_skips_the_step_and_halves_the_scale(opt, level):
    model, optimizer = initialized("test_vit", level, opt)
    scaler = ApexScaler()
    data = images(3, overflow_at=1)
    train_as_timm(model, optimizer, data[:1], scaler, clip_grad=1.0)
    before = weights(model)
    train_as_timm(model, optimizer, data[1:2], scaler, clip_grad=1.0)
    assert_same_weights(model, before)
    assert scale() == FIRST_SCALE / 2
    train_as_timm(model, optimizer, data[2:], scaler, clip_grad=1.0)
    assert scale() == FIRST_SCALE / 2
    after = weights(model)
    assert all(tensor.isfinite().all() for tensor in after.values())
    assert any(not torch.equal(after[name], before[name]) for name in before)


def test_a_resumed_run_ends_like_an_uninterrupted_one(tmp_path):
    data = images(6, overflow_at=1)
    whole, optimizer = initialized("test_vit", "O1", FusedAdam)
    train_as_timm(whole, optimizer, data, ApexScaler(), clip_grad=1.0)
    end = scale()
    library_amp.reset()

    model, optimizer = initialized("test_vit", "O1", FusedAdam)
    scaler = ApexScaler()
    train_as_timm(model, optimizer, data[:3], scaler, clip_grad=1.0)
    saver = CheckpointSaver(model, optimizer, amp_scaler=scaler, checkpoint_dir=str(tmp_path))
    saver.save_checkpoint(epoch=0, metric=1.0)
    library_amp.reset()

    resumed, optimizer = initialized("test_vit", "O1", FusedAdam)
    assert scale() == FIRST_SCALE
    assert resume_checkpoint(resumed, tmp_path / "last.pth.tar", optimizer, ApexScaler()) == 1
    assert scale() == FIRST_SCALE / 2
    train_as_timm(resumed, optimizer, data[3:], ApexScaler(), clip_grad=1.0)
    assert_same_weights(resumed, weights(whole))
    assert scale() == end
