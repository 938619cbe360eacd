"""Training checkpoints as apex, torch.amp and the scripts around them laid them out, resumed; and ours, read there."""

import argparse
import copy
import importlib
import io
import sys
import types
import typing
from collections import OrderedDict

import pytest
import torch
from ampctx_apex.checkpoints import checkpoint, load_checkpoint
from torch import nn

from ampctx import AmpSession, GradScaler, amp
from ampctx._errors import AmpError, AmpKeyError, AmpTypeError, AmpValueError
from ampctx.optimizers import LARC, FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
FUSED = {
    "adam": lambda p: FusedAdam(p, lr=0.02, weight_decay=0.1),
    "lamb": lambda p: FusedLAMB(p, lr=0.02),
    "sgd": lambda p: FusedSGD(p, lr=0.02, momentum=0.9),
    "novograd": lambda p: FusedNovoGrad(p, lr=0.02, weight_decay=0.1),
    "adagrad": lambda p: FusedAdagrad(p, lr=0.02),
}
TORCH = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, eps=1e-3),  # of fp16 at O3
    "sgd": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9),
}
SCALES = {"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 7}}


def mlp(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def train(model, optimizer, steps, first=0):
    """Steps through amp; the losses."""
    losses = []
    for step in range(first, first + steps):
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
        loss = model(x).float().square().mean()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def start(level, make=FUSED["adam"], seed=0, **options):
    model = mlp(seed)
    return amp.initialize(model, make(model.parameters()), opt_level=level, verbosity=0, **options)


def filed(content):
    """Through a file, and back by plain torch at its safest."""
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def weights(model):
    return {k: v.clone() for k, v in model.state_dict().items()}


def everything(model, optimizer):
    """Copies of model weights, stepped parameters, their state and options, and the loss scales."""
    params = [p for g in optimizer.param_groups for p in g["params"]]
    return copy.deepcopy(
        [
            weights(model),
            [p.detach() for p in params],
            optimizer.state_dict(),
            amp.state_dict(),
        ]
    )


def assert_same(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=0)


def masters_of(optimizer):
    return [p.detach().clone() for p in amp.master_params(optimizer)]


# --- a checkpoint made by apex ----------------------------------------------------------------------------------------


def made_by_apex(name, model, optimizer, steps, masters=True):
    """A run of ours at O2, written down as apex would: fp16 weights shown in fp32, steps and NovoGrad's norms in the
    group, the options that apex has, "master params" as parameters."""
    content = {
        "model": OrderedDict((k, v.clone()) for k, v in model.state_dict().items()),
        "optimizer": copy.deepcopy(optimizer.state_dict()),
        "amp": OrderedDict(copy.deepcopy(SCALES)),
        "epoch": 3,
    }
    for state in content["optimizer"]["state"].values():
        state.pop("step")
    for group in content["optimizer"]["param_groups"]:
        for added in ("maximize", "seed", "amsgrad", "lr_decay"):
            group.pop(added, None)
        if name in ("adam", "lamb", "novograd"):
            group["step"] = steps
        if name == "novograd":
            states = [content["optimizer"]["state"][key] for key in group["params"]]
            # By dtype of what is stepped: the masters are fp32.
            group["exp_avg_sq"] = [torch.zeros(0), torch.stack([s.pop("exp_avg_sq") for s in states])]
    if masters:
        content["master params"] = list(amp.master_params(optimizer))
    return content


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", FUSED)
def test_a_checkpoint_of_apex_resumes_at_every_level(name, level):
    model, optimizer = start("O2", FUSED[name])
    train(model, optimizer, 3)
    content = filed(made_by_apex(name, model, optimizer, 3))
    amp.reset()

    model, optimizer = start(level, FUSED[name], seed=1)
    loaded = load_checkpoint(content, model, optimizer)
    assert loaded.found == {
        "model": "model",
        "optimizer": "optimizer",
        "loss_scale": "amp",
        "masters": "master params",
    }
    assert loaded.unused == {"epoch": 3}
    assert amp.state_dict() == SCALES
    dtype = {"O3": torch.float16}.get(level, torch.float32)
    for i, (p, saved) in enumerate(zip(amp.master_params(optimizer), content["master params"], strict=True)):
        # BatchNorm stays in fp32 at O2 and O5, is cast at O3.
        assert p.dtype == dtype
        assert_same(p.detach(), saved.detach().to(dtype))
        state = optimizer.state[p]
        key = {"sgd": "momentum_buffer", "adagrad": "sum"}.get(name, "exp_avg")
        assert_same(state[key], content["optimizer"]["state"][i][key])
        # apex's FusedSGD counts no steps, but has begun; Adagrad's formula needs none.
        if name != "adagrad":
            assert state["step"].item() == (1 if name == "sgd" else 3)
    train(model, optimizer, 1, first=3)
    assert amp.state_dict()["loss_scaler0"]["unskipped"] == 8


@pytest.mark.parametrize("name", FUSED)
def test_an_o2_checkpoint_of_apex_goes_on_as_the_run_did(name):
    model, optimizer = start("O2", FUSED[name])
    amp.load_state_dict(SCALES)
    train(model, optimizer, 3)
    content = filed(made_by_apex(name, model, optimizer, 3))
    content["amp"] = amp.state_dict()
    losses = train(model, optimizer, 4, first=3)
    expected = everything(model, optimizer)
    amp.reset()

    model, optimizer = start("O2", FUSED[name], seed=1)
    load_checkpoint(content, model, optimizer)
    assert train(model, optimizer, 4, first=3) == losses
    resumed = everything(model, optimizer)
    for state in (resumed, expected):
        # apex's FusedSGD and FusedAdagrad count no steps.
        for of_p in state[2]["state"].values() if name in ("sgd", "adagrad") else []:
            of_p.pop("step")
    assert_same(resumed, expected)


def test_without_masters_they_start_from_the_models_weights():
    model, optimizer = start("O2")
    train(model, optimizer, 3)
    content = filed(made_by_apex("adam", model, optimizer, 3, masters=False))
    amp.reset()
    model, optimizer = start("O2", seed=1)
    train(model, optimizer, 1)
    assert "masters" not in load_checkpoint(content, model, optimizer).found
    own = [v for k, v in content["model"].items() if k.endswith(("weight", "bias"))]
    assert_same(masters_of(optimizer), own)
    assert_same(weights(model), dict(content["model"]))


def test_adams_next_step_by_hand():
    """One weight, O2, from numbers that apex would have saved: computed in plain Python."""
    model = nn.Linear(1, 1, bias=False)
    model, optimizer = amp.initialize(model, FusedAdam(model.parameters(), lr=0.1), opt_level="O2", verbosity=0)
    options = {"lr": 0.25, "bias_correction": True, "betas": (0.5, 0.75), "eps": 0.0, "weight_decay": 0.0}
    content = {
        "model": {"weight": torch.tensor([[1.0]])},
        "optimizer": {
            "state": {0: {"exp_avg": torch.tensor([[1.0]]), "exp_avg_sq": torch.tensor([[4.0]])}},
            "param_groups": [{**options, "step": 1, "params": [0]}],
        },
        "amp": {"loss_scaler0": {"loss_scale": 8.0, "unskipped": 1999}},
        "master params": [torch.tensor([[1.0 + 2.0**-13]])],
    }
    load_checkpoint(content, model, optimizer)
    with amp.scale_loss(model(torch.ones(1, 1)).sum() * 2, optimizer) as scaled:
        assert scaled.item() == 16.0
        scaled.backward()
    optimizer.step()
    m, v = 0.5 * 1.0 + 0.5 * 2.0, 0.75 * 4.0 + 0.25 * 4.0
    expected = 1.0 + 2.0**-13 - 0.25 * (m / (1 - 0.5**2)) / (v / (1 - 0.75**2)) ** 0.5
    (master,) = amp.master_params(optimizer)
    assert master.item() == pytest.approx(expected, rel=1e-6)
    assert model.weight.item() == master.half().item()
    # The window of 2000 clean steps ended.
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 16.0, "unskipped": 0}}


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("order", ["model-first", "optimizer-first"])
@pytest.mark.parametrize("stepped", [True, False], ids=["after-a-step", "fresh"])
def test_momentum_stays_fp32_in_every_order(level, order, stepped):
    for make in (*FUSED.values(), *TORCH.values()):
        model, optimizer = start("O2", make)
        train(model, optimizer, 2)
        content = filed(checkpoint(model, optimizer))
        amp.reset()
        model, optimizer = start(level, make, seed=1)
        train(model, optimizer, int(stepped))
        for part in [(model, None), (None, optimizer)][:: 1 if order == "model-first" else -1]:
            load_checkpoint(content, *part)
        train(model, optimizer, 1)
        for state in optimizer.state.values():
            assert {v.dtype for v in state.values()} == {torch.float32}
        amp.reset()


def test_masters_win_over_weights_that_were_rounded_otherwise():
    """From bf16 to fp16: the model's weights are not the masters' rounded, and would pull these along."""
    model, optimizer = start("O5")
    train(model, optimizer, 3)
    content = filed(checkpoint(model, optimizer))
    amp.reset()
    model, optimizer = start("O2", seed=1)
    load_checkpoint(content, model, optimizer)
    assert_same(masters_of(optimizer), content["master params"])
    for p, master in zip(model.parameters(), amp.master_params(optimizer), strict=True):
        assert_same(p.detach(), master.detach().to(p.dtype))


# --- FP16_Optimizer ---------------------------------------------------------------------------------------------------


def scaler_of_apex(module, name, attributes):
    """An object with the attributes that apex's had, of a class of apex's name."""
    scaler = type(name, (), {"__module__": module})()
    vars(scaler).update(attributes)
    return scaler


def save(content, scaler, path, monkeypatch):
    """Writes a file with that object in it, whose class is nowhere to be found when it is read."""
    module = type(scaler).__module__
    importlib.import_module(module)  # what imports it in its turn has to find it whole
    stand_in = types.ModuleType(module)
    setattr(stand_in, type(scaler).__name__, type(scaler))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, module, stand_in)
        torch.save(content, path)


def masters_by_group(model, optimizer, only_fp16):
    ours = masters_of(optimizer)
    return [[m for p, m in zip(model.parameters(), ours, strict=True) if p.dtype == torch.float16 or not only_fp16]]


OLD_SCALERS = {
    "amps": ("apex.amp.scaler", "LossScaler", {"_loss_scale": 1024.0, "_unskipped": 7, "dynamic": True}),
    "dynamic": (
        "apex.fp16_utils.loss_scaler",
        "DynamicLossScaler",
        {"cur_scale": 1024.0, "cur_iter": 10, "last_overflow_iter": 2, "scale_factor": 2.0, "scale_window": 1000},
    ),
}


@pytest.mark.parametrize("scaler", OLD_SCALERS)
def test_a_file_of_fp16_utils_with_its_scaler_object_resumes_safely(tmp_path, monkeypatch, scaler):
    model, optimizer = start("O2", TORCH["adamw"])
    train(model, optimizer, 3)
    module, name, attributes = OLD_SCALERS[scaler]
    saved_scaler = scaler_of_apex(module, name, {**attributes, "_overflow_buf": torch.zeros(1, dtype=torch.int32)})
    content = {
        "model": weights(model),
        "optimizer": {
            "loss_scaler": saved_scaler,
            "dynamic_loss_scale": True,
            "overflow": False,
            "first_closure_call_this_step": True,
            "optimizer_state_dict": optimizer.state_dict(),
            "fp32_from_fp16": masters_by_group(model, optimizer, only_fp16=True),
        },
        "args": argparse.Namespace(lr=0.1),
    }
    path = tmp_path / "checkpoint.pt"
    save(content, saved_scaler, path, monkeypatch)
    expected = masters_of(optimizer)
    state = copy.deepcopy(optimizer.state_dict()["state"])
    amp.reset()

    model, optimizer = start("O2", TORCH["adamw"], seed=1)
    loaded = load_checkpoint(path, model, optimizer)
    assert loaded.found == dict.fromkeys(("optimizer", "loss_scale", "masters"), "optimizer") | {"model": "model"}
    assert loaded.unused["args"].lr == 0.1
    assert_same(masters_of(optimizer), expected)
    assert_same(optimizer.state_dict()["state"], state)
    assert amp.state_dict() == SCALES


@pytest.mark.parametrize("flat", [True, False], ids=["until-2020", "after"])
def test_contribs_fp16_optimizer_resumes(flat):
    """Until 2020 it joined the parameters of a group to one, and so the state of its optimizer."""
    model, optimizer = start("O3")  # all parameters in fp16, as it had them
    train(model, optimizer, 3)
    inner = copy.deepcopy(optimizer.state_dict())
    masters = [[p.detach().float() + 2.0**-20 for p in model.parameters()]]
    keys = inner["param_groups"][0]["params"]
    for key in keys:
        inner["state"][key].update(step=3)
        inner["state"][key].pop("max_exp_avg_sq", None)
    names = {"fp32_groups": masters}
    if flat:
        names = {"fp32_groups_flat": [torch.cat([m.flatten() for m in masters[0]])]}
        joined = {k: torch.cat([inner["state"][key][k].flatten() for key in keys]) for k in ("exp_avg", "exp_avg_sq")}
        inner = {"state": {0: {"step": 3, **joined}}, "param_groups": [{**inner["param_groups"][0], "params": [0]}]}
    content = {
        "model": weights(model),
        "optimizer": {
            "dynamic_loss_scale": True,
            "cur_scale": 1024.0,
            "cur_iter": 10,
            "last_overflow_iter": 2,
            "scale_factor": 2,
            "scale_window": 1000,
            "optimizer_state_dict": inner,
            **names,
        },
    }
    expected = copy.deepcopy(optimizer.state_dict()["state"])
    amp.reset()

    model, optimizer = start("O2", keep_batchnorm_fp32=False, seed=1)
    load_checkpoint(filed(content), model, optimizer)
    assert_same(masters_of(optimizer), masters[0])
    assert_same(optimizer.state_dict()["state"], expected)
    assert amp.state_dict() == SCALES


def test_masters_of_fp16_optimizer_need_their_parameters():
    model, optimizer = start("O2")
    train(model, optimizer, 1)
    content = {
        "model": weights(model),
        "optimizer": {
            "optimizer_state_dict": optimizer.state_dict(),
            "fp32_from_fp16": masters_by_group(model, optimizer, only_fp16=True),
        },
    }
    amp.reset()
    model, optimizer = start("O1", seed=1)
    before = everything(model, optimizer)
    message = r"saved 4 masters, of the 6 parameters of a group, and 0 have one here. Resume at opt_level='O2'"
    with pytest.raises(AmpValueError, match=message):
        load_checkpoint(content, model, optimizer)
    assert_same(everything(model, optimizer), before)


def test_masters_of_fp16_optimizer_need_their_groups():
    model, optimizer = start("O2")
    inner = {"optimizer_state_dict": optimizer.state_dict(), "fp32_from_fp16": []}
    with pytest.raises(AmpValueError, match="saved masters of 0 groups, and the optimizer has 1"):
        load_checkpoint({"model": weights(model), "optimizer": inner}, model, optimizer)


def test_a_flat_state_of_another_size_is_an_error():
    model, optimizer = start("O2")
    flat = {"state": {0: {"exp_avg": torch.zeros(5)}}, "param_groups": [{"params": [0]}]}
    content = {"model": weights(model), "optimizer": {"optimizer_state_dict": flat, "fp32_groups_flat": []}}
    content["optimizer"]["fp32_groups_flat"] = [torch.zeros(74)]
    with pytest.raises(AmpValueError, match="the state 'exp_avg' of group 0 is flat with 5 elements, .* have 74"):
        load_checkpoint(content, model, optimizer)
    content["optimizer"]["optimizer_state_dict"]["state"] = {}
    content["optimizer"]["fp32_groups_flat"] = [torch.zeros(5)]
    with pytest.raises(AmpValueError, match="fp32_groups_flat is flat with 5 elements"):
        load_checkpoint(content, model, optimizer)


# --- layouts ----------------------------------------------------------------------------------------------------------

GRAD_SCALER = {
    "scale": 1024.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
    "_growth_tracker": 7,
}


def parts_of_a_run():
    model, optimizer = start("O2")
    train(model, optimizer, 2)
    state = (weights(model), copy.deepcopy(optimizer.state_dict()))
    amp.reset()
    return state


LAYOUTS = {
    "apex": lambda m, o: {"model": m, "optimizer": o, "amp": SCALES},
    "tacotron2": lambda m, o: {"state_dict": m, "optimizer": o, "amp": SCALES, "iteration": 5},
    "huggingface-old": lambda m, o: {"model_state_dict": m, "optimizer_state_dict": o, "amp_state_dict": SCALES},
    "lightning-apex": lambda m, o: {"state_dict": m, "optimizer_states": [o], "amp_scaling_state": SCALES},
    "lightning-native": lambda m, o: {
        "state_dict": m,
        "optimizer_states": [o],
        "native_amp_scaling_state": GRAD_SCALER,
    },
    "lightning-2": lambda m, o: {"state_dict": m, "optimizer_states": [o], "MixedPrecision": GRAD_SCALER},
    "timm": lambda m, o: {"arch": "resnet", "state_dict": m, "optimizer": o, "amp_scaler": GRAD_SCALER},
    "torchvision": lambda m, o: {"model": m, "optimizer": o, "scaler": GRAD_SCALER, "args": None},
    "detectron2": lambda m, o: {"model": m, "optimizer": o, "grad_scaler": GRAD_SCALER, "scheduler": {}},
    "nnunet": lambda m, o: {"network_weights": m, "optimizer_state": o, "grad_scaler_state": GRAD_SCALER},
    "mmcv-apex": lambda m, o: {"meta": {}, "state_dict": m, "optimizer": o, "amp": SCALES},
    "mmcv-torch": lambda m, o: {"meta": {"fp16": {"loss_scaler": GRAD_SCALER}}, "state_dict": m, "optimizer": o},
    "mmengine-apex": lambda m, o: {"state_dict": m, "optimizer": {**o, "apex_amp": SCALES}},
    "mmengine-torch": lambda m, o: {"state_dict": m, "optimizer": {**o, "loss_scaler": GRAD_SCALER}},
    "model-and-name": lambda m, o: {"model": "resnet", "state_dict": m, "optimizer": o, "scaler": GRAD_SCALER},
    "module.": lambda m, o: {"model": {f"module.{k}": v for k, v in m.items()}, "optimizer": o, "amp": SCALES},
    "_orig_mod.": lambda m, o: {"model": {f"_orig_mod.{k}": v for k, v in m.items()}, "optimizer": o, "amp": SCALES},
    "both": lambda m, o: {"net": {f"module._orig_mod.{k}": v for k, v in m.items()}, "optim": o, "amp": SCALES},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    saved_model, saved_optimizer = parts_of_a_run()
    model, optimizer = start("O2", seed=1)
    loaded = load_checkpoint(LAYOUTS[layout](saved_model, saved_optimizer), model, optimizer)
    assert loaded.found.keys() == {"model", "optimizer", "loss_scale"}
    assert_same(weights(model), saved_model)
    assert_same(optimizer.state_dict(), saved_optimizer)
    assert amp.state_dict() == SCALES


class Wrapper(nn.Module):
    """Names everything as DistributedDataParallel does."""

    def __init__(self, module):
        super().__init__()
        self.module = module


@pytest.mark.parametrize("saved_inside", [True, False], ids=["plain-checkpoint", "wrapped-checkpoint"])
@pytest.mark.parametrize("loaded_inside", [True, False], ids=["plain-model", "wrapped-model"])
def test_wrappers_on_either_side(saved_inside, loaded_inside):
    source, target = mlp(), mlp(seed=1)
    state = (source if saved_inside else Wrapper(source)).state_dict()
    kept = list(state)
    load_checkpoint({"model": state}, target if loaded_inside else Wrapper(target))
    assert_same(dict(target.state_dict()), dict(source.state_dict()))
    assert list(state) == kept


def test_versions_of_modules_survive_renaming():
    """torch lets a BatchNorm of 2018 miss its count of batches, and no BatchNorm of today."""
    state = Wrapper(mlp()).state_dict()
    del state["module.1.num_batches_tracked"]
    before = weights(target := mlp(seed=1))
    with pytest.raises(AmpError, match=r"Missing key\(s\) in state_dict: \"1.num_batches_tracked\""):
        load_checkpoint({"model": state}, target)
    assert_same(weights(target), before)
    state._metadata["module.1"]["version"] = 1
    load_checkpoint({"model": state}, target)
    assert_same(target[1].running_mean, state["module.1.running_mean"])


def test_a_state_dict_alone():
    source, target = mlp(), mlp(seed=1)
    loaded = load_checkpoint(source.state_dict(), target)
    assert loaded.found == {"model": "state_dict"}
    assert loaded.unused == {}
    assert_same(weights(target), weights(source))


def test_without_an_optimizer_scales_and_masters_are_left_to_the_caller():
    content = {"model": mlp().state_dict(), "amp": SCALES, "master params": [], "optimizer": {"param_groups": []}}
    loaded = load_checkpoint(content, mlp(seed=1))  # no amp.initialize here
    assert loaded.found == {"model": "model"}
    assert loaded.unused.keys() == {"amp", "master params", "optimizer"}


def test_an_empty_scaler_state_is_left_to_the_caller():
    saved_model, saved_optimizer = parts_of_a_run()
    model, optimizer = start("O2", seed=1)
    loaded = load_checkpoint({"model": saved_model, "optimizer": saved_optimizer, "scaler": {}}, model, optimizer)
    assert loaded.unused == {"scaler": {}}
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 65536.0


def test_keys_choose_among_entries():
    first, ema = mlp(seed=2).state_dict(), mlp(seed=3).state_dict()
    content = {"state_dict": first, "model": ema, "deep": {"er": first}}
    target = mlp(seed=1)
    message = r"'model' and 'state_dict' each look like the state dict of a model: choose with keys=\{'model': 'model'"
    with pytest.raises(AmpValueError, match=message):
        load_checkpoint(content, target)
    assert load_checkpoint(content, target, keys={"model": "model"}).unused.keys() == {"state_dict", "deep"}
    assert_same(weights(target), dict(ema))
    assert load_checkpoint(content, target, keys={"model": "deep.er"}).found == {"model": "deep.er"}
    assert_same(weights(target), dict(first))


# --- several ----------------------------------------------------------------------------------------------------------


def gan(level="O2", seed=0):
    models = [mlp(seed), mlp(seed + 1)]
    optimizers = [FUSED["adam"](models[0].parameters()), FUSED["sgd"](models[1].parameters())]
    return amp.initialize(models, optimizers, opt_level=level, num_losses=2, verbosity=0)


def train_gan(models, optimizers, steps, first=0):
    for step in range(first, first + steps):
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
        for i, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            with amp.scale_loss(model(x).float().square().mean(), optimizer, loss_id=i) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("named", [True, False], ids=["names-of-their-own", "lists"])
def test_lists_of_models_optimizers_and_scales(named):
    models, optimizers = gan()
    train_gan(models, optimizers, 2)
    content = filed(checkpoint(models, optimizers))
    assert [len(part) for part in content.values()] == [2, 2, 2, 2]
    keys = {}
    if named:
        content["netG"], content["netD"] = content.pop("model")
        content["optG"], content["optD"] = content.pop("optimizer")
        keys = {"model": ["netG", "netD"], "optimizer": ["optG", "optD"]}
    train_gan(models, optimizers, 2, first=2)
    expected = [everything(m, o) for m, o in zip(models, optimizers, strict=True)]
    amp.reset()

    models, optimizers = gan(seed=5)
    loaded = load_checkpoint(content, models, optimizers, keys=keys)
    assert loaded.unused == {}
    train_gan(models, optimizers, 2, first=2)
    assert_same([everything(m, o) for m, o in zip(models, optimizers, strict=True)], expected)


def test_nothing_is_loaded_when_the_second_of_several_does_not_fit():
    models, optimizers = gan()
    train_gan(models, optimizers, 2)
    content = filed(checkpoint(models, optimizers))
    content["optimizer"][1]["param_groups"][0]["lr"] = -1.0
    amp.reset()
    models, optimizers = gan(seed=5)
    train_gan(models, optimizers, 1)
    before = [everything(m, o) for m, o in zip(models, optimizers, strict=True)]
    with pytest.raises(AmpValueError, match="Invalid learning rate: -1.0"):
        load_checkpoint(content, models, optimizers)
    assert_same([everything(m, o) for m, o in zip(models, optimizers, strict=True)], before)


# --- other optimizers, other scalers ----------------------------------------------------------------------------------


def one_step_without_amp(model, optimizer, step):
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_steps_that_apex_counted_by_group_go_to_torchs_optimizer():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    for step in range(3):
        one_step_without_amp(model, optimizer, step)
    content = {"model": weights(model), "optimizer": copy.deepcopy(optimizer.state_dict())}
    for state in content["optimizer"]["state"].values():
        del state["step"]
    (group,) = content["optimizer"]["param_groups"]
    names = ("lr", "betas", "eps", "weight_decay", "params")
    content["optimizer"]["param_groups"] = [{**{k: group[k] for k in names}, "bias_correction": True, "step": 3}]
    resumed_model = mlp(seed=1)
    resumed = torch.optim.AdamW(resumed_model.parameters())
    load_checkpoint(content, resumed_model, resumed)
    assert "step" not in resumed.param_groups[0]
    one_step_without_amp(model, optimizer, 3)
    one_step_without_amp(resumed_model, resumed, 3)
    assert_same(weights(resumed_model), weights(model))


def test_torchs_optimizer_cannot_leave_out_the_bias_correction():
    model = mlp()
    state = FusedAdam(model.parameters(), bias_correction=False).state_dict()
    state["param_groups"][0]["step"] = 3
    with pytest.raises(AmpValueError, match="had bias_correction=False, which AdamW does not support"):
        load_checkpoint({"optimizer": state}, None, torch.optim.AdamW(model.parameters()))


@pytest.mark.parametrize(("name", "theirs"), [("adam", "adamw"), ("sgd", "sgd")])
def test_what_is_written_loads_into_plain_torch(name, theirs, tmp_path):
    model, optimizer = start("O2", FUSED[name])
    train(model, optimizer, 2)
    torch.save(checkpoint(model, optimizer, scaler_format="torch"), tmp_path / "checkpoint.pt")
    saved_masters = masters_of(optimizer)
    content = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert list(content) == ["model", "optimizer", "scaler", "master params"]
    plain = mlp(seed=1)
    plain.load_state_dict(content["model"])
    goes_on = TORCH[theirs](plain.parameters())
    goes_on.load_state_dict(content["optimizer"])
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(content["scaler"])
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (65536.0, 2)
    with torch.no_grad():
        for p, master in zip(plain.parameters(), content["master params"], strict=True):
            p.copy_(master)
    assert_same([p.detach() for p in plain.parameters()], saved_masters)
    amp.reset()
    # The same step by both, in fp32.
    model, optimizer = start("O0", FUSED[name], seed=1)
    load_checkpoint(content, model, optimizer)
    one_step_without_amp(plain, goes_on, 2)
    train(model, optimizer, 1, first=2)
    torch.testing.assert_close(weights(model), weights(plain), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scaler_class", [GradScaler, torch.amp.GradScaler], ids=["ours", "torchs"])
@pytest.mark.parametrize("saved", [SCALES, GRAD_SCALER], ids=["apexs-state", "torchs-state"])
def test_a_grad_scaler_takes_the_scale(scaler_class, saved):
    model, optimizer, scaler = mlp(), None, scaler_class("cpu")
    optimizer = FUSED["adam"](model.parameters())
    content = {"model": weights(model), "optimizer": optimizer.state_dict(), "amp": saved}
    loaded = load_checkpoint(content, model, optimizer, scaler=scaler)
    assert loaded.found["loss_scale"] == "amp"
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (1024.0, 7)
    assert checkpoint(scaler=scaler) == {"amp": SCALES}
    assert checkpoint(scaler=scaler, scaler_format="torch")["scaler"].items() >= GRAD_SCALER.items()


def test_a_session_of_its_own_takes_the_scale_and_the_masters():
    session = AmpSession()
    model = mlp()
    model, optimizer = session.initialize(model, FUSED["adam"](model.parameters()), opt_level="O2", verbosity=0)
    session.load_state_dict(SCALES)
    content = filed(checkpoint(model, optimizer, scaler=session))
    assert content["amp"] == SCALES
    content["master params"] = [p + 2.0**-20 for p in content["master params"]]
    session.load_state_dict({"loss_scaler0": {"loss_scale": 4.0, "unskipped": 0}})
    load_checkpoint(content, model, optimizer, scaler=session)
    assert session.state_dict() == SCALES
    assert_same([p.detach() for p in session.master_params(optimizer)], content["master params"])
    session.reset()


def test_no_scaler_no_scale():
    model = mlp()
    optimizer = FUSED["adam"](model.parameters())
    content = {"model": weights(model), "optimizer": optimizer.state_dict(), "amp": SCALES}
    assert load_checkpoint(content, model, optimizer, scaler=None).unused == {"amp": SCALES}
    assert list(checkpoint(model, optimizer, scaler=None)) == ["model", "optimizer"]


def test_larc_goes_through():
    make = lambda p: LARC(FUSED["sgd"](p))  # noqa: E731
    model, optimizer = start("O2", make)
    train(model, optimizer, 2)
    content = filed(checkpoint(model, optimizer))
    losses = train(model, optimizer, 2, first=2)
    amp.reset()
    model, optimizer = start("O2", make, seed=1)
    load_checkpoint(content, model, optimizer)
    assert train(model, optimizer, 2, first=2) == losses


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("make", [*FUSED.values(), *TORCH.values()], ids=[*FUSED, *(f"torch-{n}" for n in TORCH)])
def test_our_own_checkpoint_resumes_bit_for_bit(make, level):
    model, optimizer = start(level, make)
    train(model, optimizer, 3)
    content = filed(checkpoint(model, optimizer))
    losses = train(model, optimizer, 3, first=3)
    expected = everything(model, optimizer)
    amp.reset()
    model, optimizer = start(level, make, seed=1)
    train(model, optimizer, 1)
    load_checkpoint(content, model, optimizer)
    assert train(model, optimizer, 3, first=3) == losses
    assert_same(everything(model, optimizer), expected)


# --- what does not fit ------------------------------------------------------------------------------------------------


def drop(*path):
    def change(content):
        for key in path[:-1]:
            content = content[key]
        del content[path[-1]]

    return change


def put(*path, value):
    def change(content):
        for key in path[:-1]:
            content = content[key]
        content[path[-1]] = value

    return change


BAD = {
    "no-model": (
        drop("model"),
        AmpKeyError,
        "has no model under a known name, it has 'optimizer', 'amp', 'master params'",
    ),
    "no-optimizer": (drop("optimizer"), AmpKeyError, r"has no optimizer under .* keys=\{'optimizer': ...\}"),
    "two-models": (put("model", value=[{"a": torch.ones(1)}] * 2), AmpValueError, r"state of 2 model\(s\), and 1 were"),
    "missing-key": (drop("model", "0.bias"), AmpError, "'model' does not fit the model.*Missing key.*0.bias"),
    "foreign-key": (put("model", "fc", value=torch.ones(1)), AmpError, 'Unexpected key.*"fc"'),
    "shape": (put("model", "0.bias", value=torch.ones(3)), AmpError, "size mismatch for 0.bias"),
    "groups": (
        drop("optimizer", "param_groups", 0),
        AmpValueError,
        r"optimizers\[0\] \(FusedAdam\) has \[6\] .* the",
    ),
    "state-shape": (
        put("optimizer", "state", 0, "exp_avg", value=torch.ones(3)),
        AmpValueError,
        "'exp_avg' of param_groups",
    ),
    "no-scale-value": (drop("amp", "loss_scaler0", "unskipped"), AmpKeyError, r'"loss_scaler0"\]: .* no "unskipped"'),
    "few-masters": (drop("master params", 0), AmpValueError, "'master params' holds 5 tensors for 6 parameters"),
    "master-shape": (
        put("master params", 1, value=torch.ones(3)),
        AmpValueError,
        r"'master params'\[1\] has shape \(3,\), the parameter has \(8,\)",
    ),
    "masters-of-two": (
        put("master params", value=[[torch.ones(1)], [torch.ones(1)]]),
        AmpValueError,
        "'master params' has 2 items, expected a list of tensors for each of the 1 optimizers",
    ),
    "masters-complex": (
        put("master params", 1, value=torch.ones(8) + 1j),
        AmpTypeError,
        r"'master params'\[1\] is torch.complex64, expected a floating type",
    ),
    "masters-integer": (put("master params", 1, value=torch.ones(8).long()), AmpTypeError, r"\[1\] is torch.int64"),
    "masters-string": (put("master params", 1, value="x"), AmpTypeError, "'master params' is not a list of tensors"),
    "foreign-masters": (put("masters", value={"node": 1}), AmpTypeError, "'masters' is not a list of .* with 'node'"),
    "foreign-amp": (put("amp", value={"level": 1}), AmpTypeError, "'amp' is not the state of amp .* dict with 'level'"),
    "foreign-grad-scaler": (
        put("grad_scaler", value=[1]),
        AmpTypeError,
        "'grad_scaler' is not .* of type list. Name the right entry with keys=",
    ),
    "no-groups": (drop("optimizer", "param_groups"), AmpTypeError, "'optimizer' is not the state .* dict with 'state'"),
    "groups-string": (
        put("optimizer", "param_groups", value="x"),
        AmpTypeError,
        r"'optimizer'\[\"param_groups\"\] is of type str, expected a list",
    ),
    "group-list": (
        put("optimizer", "param_groups", 0, value=[]),
        AmpTypeError,
        r"\[0\] is of type list, expected a dict",
    ),
    "no-params": (drop("optimizer", "param_groups", 0, "params"), AmpKeyError, r'\[0\] has no "params", it has'),
    "params-number": (put("optimizer", "param_groups", 0, "params", value=6), AmpTypeError, "is no list of numbers"),
    "params-twice": (
        put("optimizer", "param_groups", 0, "params", value=[0] * 6),
        AmpValueError,
        r'\["params"\] has 0, which stands for another',
    ),
    "no-state": (drop("optimizer", "state"), AmpKeyError, "'optimizer' has no \"state\", it has 'param_groups'"),
    "state-none": (put("optimizer", "state", value=None), AmpTypeError, r'\["state"\] is of type NoneType, expected'),
    "state-list": (
        put("optimizer", "state", 0, value=[1]),
        AmpTypeError,
        r'\["state"\]\[0\] is of type list, expected',
    ),
    "optimizer-of-fp16": (
        put("optimizer", value={"optimizer_state_dict": None}),
        AmpTypeError,
        "'optimizer' is of type NoneType, expected a dict",
    ),
    "no-lr": (
        drop("optimizer", "param_groups", 0, "lr"),
        AmpKeyError,
        r"param_groups\[0\] of the checkpoint has no 'lr'",
    ),
    "lr-string": (put("optimizer", "param_groups", 0, "lr", value="fast"), AmpTypeError, "lr.*(fast|str)"),
    "betas-number": (put("optimizer", "param_groups", 0, "betas", value=0.9), AmpTypeError, "betas"),
    "step-negative": (
        put("optimizer", "state", 0, "step", value=-3),
        AmpValueError,
        "'step' of .* is -3, expected a count",
    ),
    "step-string": (put("optimizer", "state", 0, "step", value="x"), AmpTypeError, "'step' of .* is of type str"),
    "group-step": (
        put("optimizer", "param_groups", 0, "step", value=-1),
        AmpValueError,
        r"param_groups\[0\]\['step'\] of the checkpoint is -1, expected a count",
    ),
    "state-string": (
        put("optimizer", "state", 0, "exp_avg", value="x"),
        AmpTypeError | AmpValueError,
        "'exp_avg' of .* is of type str, expected a tensor",
    ),
    "key-number": (put("model", 1, value=torch.ones(1)), AmpTypeError, "'model' has the key 1, expected names"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("make", [FUSED["adam"], TORCH["adamw"]], ids=["fused", "torch"])
def test_what_does_not_fit_changes_nothing(case, make):
    change, kind, message = BAD[case]
    model, optimizer = start("O2", make)
    train(model, optimizer, 2)
    content = filed(checkpoint(model, optimizer))
    change(content)
    amp.reset()
    model, optimizer = start("O2", make, seed=1)
    train(model, optimizer, 1)
    before = everything(model, optimizer)
    with pytest.raises(
        typing.get_args(kind) or kind, match="(?s)" + message.replace("FusedAdam", type(optimizer).__name__)
    ):
        load_checkpoint(content, model, optimizer)
    assert_same(everything(model, optimizer), before)
    train(model, optimizer, 1)


@pytest.mark.parametrize("missing", ["exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam], ids=lambda c: c.__name__)
def test_half_a_state_of_torch_is_refused(make, missing):
    model, optimizer = start("O2", make)
    train(model, optimizer, 2)
    content = filed(checkpoint(model, optimizer))
    del content["optimizer"]["state"][3][missing]
    before = everything(model, optimizer)
    with pytest.raises(AmpKeyError, match=rf"param_groups\[0\]\['params'\]\[3\] has no '{missing}', only \['exp_"):
        load_checkpoint(content, model, optimizer)
    assert_same(everything(model, optimizer), before)


@pytest.mark.parametrize(
    "entry",
    [{"amp": None}, {"amp": True}, {"amp": "O1"}, {"scaler": {"mean": 1.0}}, {"scaler": object()}, {"masters": None}],
    ids=["none", "flag", "level", "data-scaler", "scaler-object", "no-masters"],
)
def test_entries_that_are_no_state_are_left_to_the_caller(entry, caplog):
    saved_model, saved_optimizer = parts_of_a_run()
    model, optimizer = start("O2", seed=1)
    loaded = load_checkpoint({"model": saved_model, "optimizer": saved_optimizer, **entry}, model, optimizer)
    assert loaded.unused == entry
    assert not caplog.records


def test_an_empty_amp_state_is_logged(caplog):
    """A GradScaler would refuse it; a run whose amp was off may go on with amp."""
    saved_model, saved_optimizer = parts_of_a_run()
    model, optimizer = start("O2", seed=1)
    loaded = load_checkpoint({"model": saved_model, "optimizer": saved_optimizer, "amp": {}}, model, optimizer)
    assert loaded.unused == {"amp": {}}
    assert [r.getMessage() for r in caplog.records] == [
        "the checkpoint's 'amp' is empty, as a disabled scaler saves it. Not loaded."
    ]


@pytest.mark.parametrize("scaler_class", [GradScaler, torch.amp.GradScaler], ids=["ours", "torchs"])
def test_several_scales_and_a_grad_scaler(scaler_class):
    """An lr on the device is filled by loading, and put back."""
    model, other = mlp(), mlp(1)
    optimizer = FusedAdam(model.parameters(), lr=0.25, capturable=True)
    two = {**SCALES, "loss_scaler1": SCALES["loss_scaler0"]}
    saved = FusedAdam(other.parameters(), lr=0.5, capturable=True).state_dict()
    content = {"model": other.state_dict(), "optimizer": saved, "amp": two}
    before, rate = weights(model), optimizer.param_groups[0]["lr"]
    with pytest.raises(AmpValueError, match=r"2 loss scales \(loss_scaler0, loss_scaler1\)"):
        load_checkpoint(content, model, optimizer, scaler=scaler_class("cpu"))
    assert_same(weights(model), before)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.25


def test_before_initialize_the_scales_have_no_place():
    model = mlp()
    optimizer = FUSED["adam"](model.parameters())
    content = {"model": mlp(1).state_dict(), "optimizer": optimizer.state_dict(), "amp": SCALES}
    before = weights(model)
    with pytest.raises(AmpError, match=r"before amp.initialize"):
        load_checkpoint(content, model, optimizer)
    assert_same(weights(model), before)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda m: load_checkpoint(5, m), AmpTypeError, "a checkpoint is a dict or the path of one, got int"),
        (lambda m: load_checkpoint({}, m), AmpKeyError, "it has no entries"),
        (lambda m: load_checkpoint({}, m, keys={"net": "x"}), AmpValueError, r"keys has \['net'\], expected some of"),
        (
            lambda m: load_checkpoint({"a": 5}, m, keys={"model": "b"}),
            AmpKeyError,
            r"keys\['model'\] is 'b', .*'a'",
        ),
        (lambda m: load_checkpoint({"a": 5}, m, keys={"model": "a"}), AmpTypeError, "'a' is not the state dict .* int"),
        (lambda m: checkpoint(m, scaler_format="apx"), AmpValueError, "scaler_format is 'apx'"),
    ],
    ids=["type", "empty", "unknown-part", "absent-key", "wrong-kind", "format"],
)
def test_arguments_are_checked(call, kind, message):
    with pytest.raises(kind, match=message):
        call(mlp())


def test_two_scales_have_no_torch_format():
    models, optimizers = gan()
    with pytest.raises(AmpValueError, match="2 loss scales"):
        checkpoint(models, optimizers, scaler_format="torch")


class Custom:
    pass


def test_a_file_with_other_classes_says_what_to_do(tmp_path):
    torch.save({"model": mlp().state_dict(), "config": Custom()}, tmp_path / "checkpoint.pt")
    with pytest.raises(AmpError, match=r"checkpoint.pt holds .*Custom.*If you trust the file, call torch.load\(path"):
        load_checkpoint(str(tmp_path / "checkpoint.pt"), mlp())
