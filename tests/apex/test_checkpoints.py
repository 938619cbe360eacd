"""Training checkpoints as apex wrote them, resumed."""

import argparse
import copy
import importlib
import sys
import types
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from amp_models import weights as stepped
from ampctx_apex.checkpoints import (
    fp16_optimizer_entry,
    load_file,
    load_fp16_optimizer,
    to_amp_state,
    to_grad_scaler_state,
)
from apex.fp16_utils import DynamicLossScaler
from kit import assert_same, every_level, mlp, start, through_a_file, train

from ampctx import AmpError, AmpKeyError, AmpTypeError, AmpValueError, GradScaler, amp
from ampctx.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD

FUSED = {
    "adam": lambda p: FusedAdam(p, lr=0.02, weight_decay=0.1),
    "lamb": lambda p: FusedLAMB(p, lr=0.02),
    "sgd": lambda p: FusedSGD(p, lr=0.02, momentum=0.9),
    "novograd": lambda p: FusedNovoGrad(p, lr=0.02, weight_decay=0.1),
    "adagrad": lambda p: FusedAdagrad(p, lr=0.02),
}
SCALES = {"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 7}}


def weights(model):
    return {k: v.clone() for k, v in model.state_dict().items()}


def everything(model, optimizer):
    """Copies of model weights, stepped parameters, their state and options, and the loss scales."""
    params = [p for g in optimizer.param_groups for p in g["params"]]
    return copy.deepcopy([weights(model), [p.detach() for p in params], optimizer.state_dict(), amp.state_dict()])


def resume(content, model, optimizer):
    """What apex's programs write."""
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    amp.load_state_dict(content["amp"])
    for p, saved in zip(amp.master_params(optimizer), content.get("master params", ())):  # noqa: B905 - may have none
        p.data.copy_(saved.data)


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
            group["step"] = torch.tensor([steps], dtype=torch.int32) if name == "lamb" else steps
        if name == "novograd":
            states = [content["optimizer"]["state"][key] for key in group["params"]]
            # By dtype of what is stepped: the masters are fp32.
            group["exp_avg_sq"] = [torch.zeros(0), torch.stack([s.pop("exp_avg_sq") for s in states])]
    if masters:
        content["master params"] = list(amp.master_params(optimizer))
    return content


@every_level
@pytest.mark.parametrize("name", FUSED)
def test_a_checkpoint_of_apex_resumes_at_every_level(name, level):
    model, optimizer = start(amp, "O2", FUSED[name])
    train(amp, model, optimizer, 3)
    content = through_a_file(made_by_apex(name, model, optimizer, 3))
    amp.reset()

    model, optimizer = start(amp, level, FUSED[name], mlp(1))
    kept = copy.deepcopy(content["optimizer"])
    resume(content, model, optimizer)
    assert_same(content["optimizer"], kept)
    assert "step" not in optimizer.param_groups[0]
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
    train(amp, model, optimizer, 1, first=3)
    assert amp.state_dict()["loss_scaler0"]["unskipped"] == 8


@pytest.mark.parametrize("name", FUSED)
def test_an_o2_checkpoint_of_apex_goes_on_as_the_run_did(name):
    model, optimizer = start(amp, "O2", FUSED[name])
    amp.load_state_dict(SCALES)
    train(amp, model, optimizer, 3)
    content = through_a_file(made_by_apex(name, model, optimizer, 3))
    content["amp"] = amp.state_dict()
    losses = train(amp, model, optimizer, 4, first=3)
    expected = everything(model, optimizer)
    amp.reset()

    model, optimizer = start(amp, "O2", FUSED[name], mlp(1))
    resume(content, model, optimizer)
    assert train(amp, model, optimizer, 4, first=3) == losses
    resumed = everything(model, optimizer)
    for state in (resumed, expected):
        # apex's FusedSGD and FusedAdagrad count no steps.
        for of_p in state[2]["state"].values() if name in ("sgd", "adagrad") else []:
            of_p.pop("step")
    assert_same(resumed, expected)


# --- FP16_Optimizer ---------------------------------------------------------------------------------------------------


def save(content, scaler, path, monkeypatch):
    """Writes a file with that object in it, whose class is nowhere to be found when it is read."""
    module = type(scaler).__module__
    importlib.import_module(module)  # what imports it in its turn has to find it whole
    stand_in = types.ModuleType(module)
    setattr(stand_in, type(scaler).__name__, type(scaler))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, module, stand_in)
        torch.save(content, path)


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
    model, optimizer = start(amp, "O2", "AdamW-foreach")
    train(amp, model, optimizer, 3)
    module, name, attributes = OLD_SCALERS[scaler]
    saved_scaler = type(name, (), {"__module__": module})()
    vars(saved_scaler).update(attributes, _overflow_buf=torch.zeros(1, dtype=torch.int32))
    pairs = zip(model.parameters(), stepped(optimizer), strict=True)
    content = {
        "model": weights(model),
        "optimizer": {
            "loss_scaler": saved_scaler,
            "dynamic_loss_scale": True,
            "overflow": False,
            "first_closure_call_this_step": True,
            "optimizer_state_dict": optimizer.state_dict(),
            "fp32_from_fp16": [[master for p, master in pairs if p.dtype == torch.float16]],
        },
        "args": argparse.Namespace(lr=0.1),
    }
    path = tmp_path / "checkpoint.pt"
    save(content, saved_scaler, path, monkeypatch)
    expected = stepped(optimizer)
    state = copy.deepcopy(optimizer.state_dict()["state"])
    amp.reset()

    model, optimizer = start(amp, "O2", "AdamW-foreach", mlp(1))
    loaded = load_file(path)
    assert loaded["args"].lr == 0.1
    model.load_state_dict(loaded["model"])
    load_fp16_optimizer(optimizer, loaded["optimizer"])
    assert_same(stepped(optimizer), expected)
    assert_same(optimizer.state_dict()["state"], state)
    assert amp.state_dict() == SCALES


@pytest.mark.parametrize("flat", [True, False], ids=["until-2020", "after"])
def test_contribs_fp16_optimizer_resumes(flat):
    """Until 2020 it joined the parameters of a group to one, and so the state of its optimizer."""
    model, optimizer = start(amp, "O3", FUSED["adam"])  # all parameters in fp16, as it had them
    train(amp, model, optimizer, 3)
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

    model, optimizer = start(amp, "O2", FUSED["adam"], mlp(1), keep_batchnorm_fp32=False)
    loaded = through_a_file(content)
    model.load_state_dict(loaded["model"])
    load_fp16_optimizer(optimizer, loaded["optimizer"])
    assert_same(stepped(optimizer), masters[0])
    assert_same(optimizer.state_dict()["state"], expected)
    assert amp.state_dict() == SCALES


FLAT = {"state": {0: {"exp_avg": torch.zeros(5)}}, "param_groups": [{"params": [0]}]}
BAD = {
    "no masters here": ("O1", {"fp32_from_fp16": [[]]}, "the optimizer has no masters. Resume at opt_level='O2'"),
    "no state of it": ("O1", None, r"this is no state of an FP16_Optimizer: it has \['param_groups', 'state'\]"),
    "groups": ("O2", {"fp32_from_fp16": []}, "has 0 groups, the optimizer has 1"),
    "shapes": ("O2", {"fp32_from_fp16": [[torch.ones(2)]]}, r"\[0\] has masters of shapes \[\(2,\)\]"),
    "flat state": ("O2", {"optimizer_state_dict": FLAT, "fp32_groups_flat": [torch.zeros(74)]},
        "the state 'exp_avg' of group 0 is flat with 5 elements, .* have 74"),
    "flat masters": ("O2", {"optimizer_state_dict": {**FLAT, "state": {}}, "fp32_groups_flat": [torch.zeros(5)]},
        r"\['fp32_groups_flat'\]\[0\] is flat with 5 elements"),
}  # fmt: skip


@pytest.mark.parametrize(("level", "content", "message"), BAD.values(), ids=BAD)
def test_a_state_of_fp16_optimizer_that_does_not_fit_changes_nothing(level, content, message):
    model, optimizer = start(amp, level)
    before, state = everything(model, optimizer), optimizer.state_dict()
    with pytest.raises(AmpKeyError if content is None else AmpValueError, match=message):
        load_fp16_optimizer(optimizer, state if content is None else {"optimizer_state_dict": state, **content})
    assert_same(everything(model, optimizer), before)


# --- files ------------------------------------------------------------------------------------------------------------


class Custom:
    pass


def test_a_file_with_other_classes_says_what_to_do(tmp_path):
    torch.save({"model": mlp().state_dict(), "config": Custom()}, tmp_path / "checkpoint.pt")
    with pytest.raises(AmpError, match=r"checkpoint.pt holds .*Custom.*If you trust the file, call torch.load\(path"):
        load_file(str(tmp_path / "checkpoint.pt"))


# --- the scales in what FP16_Optimizer of each time saved, and in a GradScaler ----------------------------------------


TORCH = {"scale": 512.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 17}
APEX = {"loss_scaler0": {"loss_scale": 512.0, "unskipped": 17}}
TWO = {**APEX, "loss_scaler1": {"loss_scale": 4.0, "unskipped": 3}}


@pytest.mark.parametrize("as_object", [True, False], ids=["fp16_utils", "contrib"])
@pytest.mark.parametrize(
    ("flags", "clean"), [("", 0), ("00", 2), ("000", 0), ("0000", 1), ("1", 0), ("0100", 2), ("01000000", 0)]
)
def test_the_counter_of_dynamic_scalers_of_2018(flags, clean, as_object):
    """Steps since the latest overflow or growth, of a window of 3."""
    scaler = DynamicLossScaler(2.0**16, scale_window=3)
    for flag in flags:
        scaler.update_scale(flag == "1")
    values = {name: getattr(scaler, name) for name in ("cur_scale", "cur_iter", "last_overflow_iter", "scale_window")}
    state = {"loss_scaler": SimpleNamespace(**values)} if as_object else values
    assert fp16_optimizer_entry(state) == {"loss_scale": scaler.cur_scale, "unskipped": clean}


@pytest.mark.parametrize(
    ("state", "entry"),
    [
        ({"loss_scaler": SimpleNamespace(_loss_scale=64.0, _unskipped=5, dynamic=True)}, (64.0, 5)),
        ({"loss_scaler": SimpleNamespace(cur_scale=128.0)}, (128.0, 0)),
        ({"dynamic_loss_scale": False, "cur_scale": 128.0, "cur_iter": 40}, (128.0, 0)),
        ({"optimizer_state_dict": {}}, None),
    ],
    ids=["amps-scaler", "static-object", "static-numbers", "no-scale"],
)
def test_the_other_scalers_of_fp16_optimizer(state, entry):
    assert fp16_optimizer_entry(state) == (entry and dict(zip(("loss_scale", "unskipped"), entry, strict=True)))


# --- between apex's format and a GradScaler's -------------------------------------------------------------------------


def test_scales_are_converted(session):
    session.initialize(mlp(), opt_level="O2", num_losses=2, verbosity=0)
    session.load_state_dict(to_amp_state(TORCH, num_losses=2))
    assert session.state_dict() == {f"loss_scaler{i}": APEX["loss_scaler0"] for i in range(2)}
    assert to_grad_scaler_state(session.state_dict(), loss_id=1) == TORCH
    for scaler in (GradScaler("cpu"), torch.amp.GradScaler("cpu")):
        scaler.load_state_dict(to_grad_scaler_state(TWO, loss_id=1))
        assert scaler.state_dict().items() >= {**TORCH, "scale": 4.0, "_growth_tracker": 3}.items()
        assert to_amp_state(scaler.state_dict()) == {"loss_scaler0": TWO["loss_scaler1"]}


@pytest.mark.parametrize(
    ("convert", "kind", "message"),
    [
        (lambda: to_grad_scaler_state(TWO), AmpValueError, r"2 loss scales \(loss_scaler0, loss_scaler1\)"),
        (lambda: to_grad_scaler_state(TWO, 2), AmpKeyError, 'no "loss_scaler2", only: loss_scaler0, loss_scaler1'),
        (lambda: to_grad_scaler_state(TWO, True), AmpTypeError, "loss_id must be an int"),
        (lambda: to_grad_scaler_state({}), AmpKeyError, 'no "loss_scaler0", only: none'),
        (lambda: to_grad_scaler_state(TORCH), AmpKeyError, 'Unexpected key.*"scale"'),
        (lambda: to_amp_state({}), AmpError, "saved from a disabled instance"),
        (lambda: to_amp_state(APEX), AmpKeyError, 'no "scale"'),
        (lambda: to_amp_state(TORCH, num_losses=0), AmpValueError, "num_losses is 0"),
        (lambda: fp16_optimizer_entry({"cur_scale": 4.0, "scale_window": 9}), AmpKeyError, 'no "last_overflow_iter"'),
    ],
    ids=["several", "missing-id", "flag-id", "empty", "torchs", "disabled", "apexs", "no-losses", "no-counts"],
)
def test_what_cannot_be_converted(convert, kind, message):
    with pytest.raises(kind, match=message):
        convert()
