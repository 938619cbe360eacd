"""Loss scales saved by apex, by torch and by us, read by each other."""

import logging

import numpy as np
import pytest
import torch
from kit import backward, mlp

from ampctx import AmpKeyError, AmpTypeError, AmpValueError, GradScaler

TORCH = {"scale": 512.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 17}
APEX = {"loss_scaler0": {"loss_scale": 512.0, "unskipped": 17}}
TWO = {**APEX, "loss_scaler1": {"loss_scale": 4.0, "unskipped": 3}}


def init(session, n_losses=1, **kwargs):
    session.initialize(mlp(), opt_level="O2", num_losses=n_losses, verbosity=0, **kwargs)


def run_torch(scaler, flags):
    """The scales that a GradScaler goes through."""
    p = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([p], lr=0.0)
    scales = []
    for flag in flags:
        scaler.scale(torch.ones(()))
        p.grad = torch.full((1,), float("inf") if flag else 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


# --- into amp ---------------------------------------------------------------------------------------------------------


def test_a_state_of_torch_loads_into_amp(session, caplog):
    theirs = torch.amp.GradScaler("cpu", init_scale=1024.0)
    run_torch(theirs, [0, 0, 1, 0, 0, 0])
    init(session)
    with caplog.at_level(logging.WARNING, "ampctx"):
        session.load_state_dict(theirs.state_dict())
    assert session.state_dict() == {"loss_scaler0": {"loss_scale": 512.0, "unskipped": 3}}
    assert caplog.text == ""


def test_a_state_of_our_grad_scaler_loads_into_amp(session):
    ours = GradScaler("cpu", init_scale=1024.0, hysteresis=2)
    run_torch(ours, [0, 1, 1, 0])
    init(session)
    session.load_state_dict(ours.state_dict())
    assert session.state_dict() == {"loss_scaler0": {"loss_scale": 512.0, "unskipped": 1}}


def test_growth_settings_of_torch_are_named_and_left(session, caplog):
    init(session)
    with caplog.at_level(logging.WARNING, "ampctx"):
        session.load_state_dict({**TORCH, "growth_interval": 100, "backoff_factor": 0.25})
    assert "not loaded from the state of a GradScaler" in caplog.text
    assert "backoff_factor=0.25 (here 0.5), growth_interval=100 (here 2000)" in caplog.text
    assert "growth_factor" not in caplog.text
    assert session.state_dict() == APEX
    assert session.loss_scales[0].growth_interval == 2000


def test_a_state_of_torch_for_several_losses_is_an_error_with_the_way_out(session):
    init(session, 2)
    way_out = r"holds one loss scale, and num_losses=2.*to_amp_state\(state, num_losses=2"
    with pytest.raises(AmpValueError, match=way_out):
        session.load_state_dict(TORCH)
    assert session.state_dict()["loss_scaler0"]["loss_scale"] == 65536.0


@pytest.mark.parametrize("key", TORCH)
def test_a_state_of_torch_without_one_of_its_entries_changes_nothing(session, key):
    init(session)
    with pytest.raises(AmpKeyError, match=f'no "{key}"'):
        session.load_state_dict({k: v for k, v in TORCH.items() if k != key})
    assert session.state_dict() == {"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0}}


def test_a_mix_of_both_formats_is_an_error(session):
    init(session)
    with pytest.raises(AmpKeyError, match='Unexpected key.*"scale"'):
        session.load_state_dict({**APEX, **TORCH})


def test_the_empty_state_of_a_disabled_scaler_is_reported(session, caplog):
    init(session)
    with caplog.at_level(logging.WARNING, "ampctx"):
        session.load_state_dict(torch.amp.GradScaler("cpu", enabled=False).state_dict())
    assert "state_dict contains 0 entries, while 1 loss_scalers are used" in caplog.text
    assert session.state_dict()["loss_scaler0"]["loss_scale"] == 65536.0


def test_a_static_scale_takes_the_value_and_says_so(session, caplog):
    init(session, loss_scale=128.0)
    with caplog.at_level(logging.WARNING, "ampctx"):
        session.load_state_dict(APEX)
    assert "loss scaler 0 is static. It goes from 128.0 to the checkpoint's 512.0 and stays" in caplog.text
    assert session.state_dict() == APEX
    caplog.clear()
    session.load_state_dict(APEX)
    assert caplog.text == ""


@pytest.mark.parametrize("loaded", [32768.0, 128.0])
def test_a_static_scale_that_skips_takes_the_value_and_keeps_it(session, caplog, loaded):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    session.initialize(model, optimizer, opt_level="O2", verbosity=0, loss_scale=8192.0, skip_nonfinite=True)
    with caplog.at_level(logging.WARNING, "ampctx"):
        session.load_state_dict({"loss_scaler0": {"loss_scale": loaded, "unskipped": 1999}})
    assert f"It goes from 8192.0 to the checkpoint's {loaded} and stays" in caplog.text
    for i, factor in enumerate((1.0, float("inf"), float("nan"))):
        backward(session, model(torch.ones(1, 2)).float().sum() * factor, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        assert session.skipped_steps(optimizer) == i
        assert session.state_dict()["loss_scaler0"]["loss_scale"] == loaded


@pytest.mark.parametrize(
    "number",
    [int, float, np.float32, np.float64, np.array, torch.tensor, lambda v: torch.tensor([float(v)])],
    ids=["int", "float", "np.float32", "np.float64", "np.array", "0-d", "1-element"],
)
def test_numbers_come_in_any_type(session, number):
    init(session)
    session.load_state_dict({"loss_scaler0": {"loss_scale": number(512), "unskipped": 17}})
    loaded = session.state_dict()
    assert loaded == APEX
    assert type(loaded["loss_scaler0"]["loss_scale"]) is float


@pytest.mark.parametrize("count", [int, np.int32, np.array, torch.tensor], ids=["int", "np.int32", "np.array", "0-d"])
def test_counts_come_in_any_type(session, count):
    init(session)
    session.load_state_dict({"loss_scaler0": {"loss_scale": 512.0, "unskipped": count(17)}})
    assert session.state_dict() == APEX


def test_more_than_nine_scales_go_by_number_in_any_order(session):
    init(session, 12)
    saved = {f"loss_scaler{i}": {"loss_scale": float(2**i), "unskipped": i} for i in range(12)}
    session.load_state_dict(dict(sorted(saved.items())))  # "loss_scaler10" comes before "loss_scaler2"
    assert session.state_dict() == saved


# --- into a GradScaler ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("live", [True, False], ids=["live", "fresh"])
def test_a_state_of_apex_loads_into_our_grad_scaler(live):
    scaler = GradScaler("cpu", 64.0, 4.0, 0.25, 18, max_scale=4096.0, hysteresis=2)
    if live:
        run_torch(scaler, [0, 1])
    before = scaler.state_dict()
    scaler.load_state_dict(APEX)
    assert scaler.state_dict() == {**before, "scale": 512.0, "_growth_tracker": 17, "_hysteresis_tracker": 2}
    # 18 clean steps are a window here, and two overflows in a row make it fall.
    assert run_torch(scaler, [0, 1, 1]) == [2048.0, 2048.0, 512.0]


def test_several_scales_of_apex_are_an_error_that_names_them():
    scaler = GradScaler("cpu", 64.0)
    with pytest.raises(AmpValueError, match=r"2 loss scales \(loss_scaler0, loss_scaler1\).*to_grad_scaler_state"):
        scaler.load_state_dict(TWO)
    assert scaler.get_scale() == 64.0


def test_a_bad_entry_of_apex_changes_no_grad_scaler():
    scaler = GradScaler("cpu", 64.0)
    with pytest.raises(AmpKeyError, match=r'\["loss_scaler0"\].*no "unskipped"'):
        scaler.load_state_dict({"loss_scaler0": {"loss_scale": 4.0}})
    assert scaler.get_scale() == 64.0


def test_numbers_of_torchs_format_may_be_tensors():
    scaler = GradScaler("cpu")
    scaler.load_state_dict({k: torch.tensor(v) for k, v in TORCH.items()})
    assert scaler.state_dict().items() >= TORCH.items()


@pytest.mark.parametrize("state", [None, [TORCH]], ids=["none", "list"])
def test_a_grad_scaler_takes_dicts_only(state):
    with pytest.raises(AmpTypeError, match="state_dict must be a dict"):
        GradScaler("cpu").load_state_dict(state)


def test_a_later_format_is_refused_by_its_number(session):
    scaler, later = GradScaler("cpu", 64.0), {**TORCH, "format": 2}
    init(session)
    for load in (scaler.load_state_dict, session.load_state_dict):
        with pytest.raises(AmpValueError, match=r'"format"\] is 2. This version of ampctx reads formats up to 1'):
            load(later)
        with pytest.raises(AmpKeyError, match='state_dict has "warmup", which this version of ampctx does not load'):
            load({**TORCH, "format": 1, "warmup": 3})
        load({**TORCH, "warmup": 3})  # as torch, which may write more
    assert scaler.get_scale() == session.state_dict()["loss_scaler0"]["loss_scale"] == 512.0


def test_an_unknown_entry_of_a_loss_scale_is_refused_by_its_name(session):
    init(session)
    with pytest.raises(
        AmpKeyError, match=r'"loss_scaler0"\].* has "warmup", which this version of ampctx does not load'
    ):
        session.load_state_dict({"loss_scaler0": {**APEX["loss_scaler0"], "warmup": 3}})
    assert session.state_dict()["loss_scaler0"]["loss_scale"] == 65536.0
