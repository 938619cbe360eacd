import logging

import pytest
import torch
from kit import mlp

from ampctx import AmpError, AmpKeyError, AmpTypeError, AmpValueError


def init(session, n_losses=2, **kwargs):
    session.initialize(mlp(), opt_level="O2", num_losses=n_losses, verbosity=0, **kwargs)


def test_the_format_of_apex(session):
    init(session, 2)
    assert session.state_dict() == {
        "loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0},
        "loss_scaler1": {"loss_scale": 65536.0, "unskipped": 0},
    }
    destination = {"epoch": 3}
    assert session.state_dict(destination) is destination
    assert list(destination) == ["epoch", "loss_scaler0", "loss_scaler1"]


def test_round_trip_of_values_that_are_not_the_defaults(session):
    init(session, 2)
    saved = {
        "loss_scaler0": {"loss_scale": 128.0, "unskipped": 7},
        "loss_scaler1": {"loss_scale": 2.0**20, "unskipped": 1999},
    }
    session.load_state_dict(saved)
    assert session.state_dict() == saved


@pytest.mark.parametrize("n", [1, 3])
def test_another_number_of_entries_is_a_warning(session, caplog, n):
    init(session, 2)
    entries = {f"loss_scaler{i}": {"loss_scale": 8.0, "unskipped": 0} for i in range(n)}
    with caplog.at_level(logging.WARNING, "ampctx"):
        session.load_state_dict(entries)
    assert f"state_dict contains {n} entries, while 2 loss_scalers are used" in caplog.text
    assert session.state_dict()["loss_scaler0"]["loss_scale"] == 8.0
    assert session.state_dict()["loss_scaler1"]["loss_scale"] == (65536.0 if n == 1 else 8.0)


GOOD = {"loss_scale": 8.0, "unskipped": 0}


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        (None, AmpTypeError, "state_dict must be a dict, got NoneType"),
        ({0: GOOD}, AmpKeyError, '"0"'),
        ({"loss_scaler²": GOOD}, AmpKeyError, "loss_scaler²"),
        ({"loss_scaler00": GOOD}, AmpKeyError, "loss_scaler00"),
        ({"loss_scaler0": GOOD, "model": {}}, AmpKeyError, r'Unexpected key\(s\) in state_dict: "model"'),
        ({"loss_scaler0": GOOD, "loss_scalerX": GOOD}, AmpKeyError, "loss_scalerX"),
        ({"loss_scaler0": GOOD, "loss_scaler1": {"loss_scale": 8.0}}, AmpKeyError, r'loss_scaler1.*"?unskipped'),
        ({"loss_scaler0": GOOD, "loss_scaler1": 8.0}, AmpTypeError, "loss_scaler1"),
        ({"loss_scaler0": GOOD, "loss_scaler1": {**GOOD, "loss_scale": 0.0}}, AmpValueError, "loss_scaler1"),
        ({"loss_scaler0": GOOD, "loss_scaler1": {**GOOD, "loss_scale": float("nan")}}, AmpValueError, "loss_scaler1"),
        ({"loss_scaler0": GOOD, "loss_scaler1": {**GOOD, "unskipped": -1}}, AmpValueError, "loss_scaler1"),
        *(
            ({"loss_scaler0": GOOD, "loss_scaler1": {**GOOD, **entry}}, error, rf'\["loss_scaler1"\]: {message}')
            for entry, error, message in (
                ({"loss_scale": torch.ones(2)}, AmpTypeError, "loss_scale must be a number"),
                ({"loss_scale": "4"}, AmpTypeError, "loss_scale must be a number"),
                ({"loss_scale": torch.tensor(0.0)}, AmpValueError, "loss_scale is 0.0"),
                ({"unskipped": 1.5}, AmpTypeError, "unskipped must be an int"),
                ({"hysteresis": -1}, AmpValueError, "hysteresis is -1"),
            )
        ),
    ],
    ids=[
        *("not-a-mapping", "number-for-a-key", "superscript", "leading-zero", "foreign-key", "no-number"),
        *("missing-field", "not-a-dict", "zero-scale", "nan-scale", "negative-count"),
        *("two-elements", "string", "collapsed", "fractional-count", "hysteresis"),
    ],
)
def test_a_bad_checkpoint_changes_nothing(session, state, error, message):
    init(session, 2)
    with pytest.raises(error, match=message):
        session.load_state_dict(state)
    assert session.state_dict()["loss_scaler0"] == {"loss_scale": 65536.0, "unskipped": 0}


def test_loading_before_initialize(session):
    with pytest.raises(AmpError, match="before amp.initialize"):
        session.load_state_dict({})


def test_saved_with_torch_and_loaded_weights_only(session, tmp_path):
    init(session, 1)
    torch.save(session.state_dict(), tmp_path / "amp.pt")
    session.load_state_dict(torch.load(tmp_path / "amp.pt", weights_only=True))
