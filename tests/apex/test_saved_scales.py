"""The loss scales in what apex's ``FP16_Optimizer`` of each time saved."""

from types import SimpleNamespace

import pytest
from ampctx_apex.checkpoints import fp16_optimizer_entry, to_amp_state, to_grad_scaler_state
from apex.fp16_utils import DynamicLossScaler
from kit import mlp

from ampctx import AmpError, AmpKeyError, AmpTypeError, AmpValueError, GradScaler

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
    ],
    ids=["amps-scaler", "static-object", "static-numbers"],
)
def test_the_other_scalers_of_fp16_optimizer(state, entry):
    assert fp16_optimizer_entry(state) == dict(zip(("loss_scale", "unskipped"), entry, strict=True))


def test_a_state_without_a_scale_has_no_entry():
    assert fp16_optimizer_entry({"optimizer_state_dict": {}}) is None


def test_a_dynamic_scaler_without_its_counts_is_an_error():
    with pytest.raises(AmpKeyError, match='no "last_overflow_iter"'):
        fp16_optimizer_entry({"cur_scale": 4.0, "scale_window": 1000})


# --- between apex's format and a GradScaler's -------------------------------------------------------------------------


def test_scales_are_converted(session):
    session.initialize(mlp(), opt_level="O2", num_losses=2, verbosity=0)
    session.load_state_dict(to_amp_state(TORCH, num_losses=2))
    assert session.state_dict() == {f"loss_scaler{i}": APEX["loss_scaler0"] for i in range(2)}
    assert to_grad_scaler_state(session.state_dict(), loss_id=1) == TORCH
    scaler = GradScaler("cpu")
    scaler.load_state_dict(to_grad_scaler_state(TWO, loss_id=1))
    assert scaler.state_dict().items() >= {**TORCH, "scale": 4.0, "_growth_tracker": 3}.items()


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
    ],
    ids=["several", "missing-id", "flag-id", "empty", "torchs", "disabled", "apexs", "no-losses"],
)
def test_what_cannot_be_converted(convert, kind, message):
    with pytest.raises(kind, match=message):
        convert()
