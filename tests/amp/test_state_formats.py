"""Loss scales saved by apex, by torch and by us, read by each other."""

import logging

import numpy as np
import pytest
import torch
from kit import INF, backward, mlp, scales

from ampctx import AmpError, AmpKeyError, AmpTypeError, AmpValueError, GradScaler

TORCH = {"scale": 512.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 17}
APEX = {"loss_scaler0": {"loss_scale": 512.0, "unskipped": 17}}
TWO = {**APEX, "loss_scaler1": {"loss_scale": 4.0, "unskipped": 3}}
FRESH = {"loss_scale": 65536.0, "unskipped": 0}


def init(session, n_losses=1, **kwargs):
    session.initialize(mlp(), opt_level="O2", num_losses=n_losses, verbosity=0, **kwargs)


# --- into amp ---------------------------------------------------------------------------------------------------------


def test_the_format_of_apex(session, tmp_path):
    with pytest.raises(AmpError, match="before amp.initialize"):
        session.load_state_dict({})
    init(session, 2)
    torch.save(session.state_dict(), tmp_path / "amp.pt")
    session.load_state_dict(torch.load(tmp_path / "amp.pt", weights_only=True))


@pytest.mark.parametrize("n", [0, 1, 3])
def test_another_number_of_entries_is_a_warning(session, caplog, n):
    """None: the state of a GradScaler that is disabled."""
    init(session, 2)
    entries = {f"loss_scaler{i}": {"loss_scale": 8.0, "unskipped": 0} for i in range(n)}
    with caplog.at_level(logging.WARNING, "ampctx"):
        session.load_state_dict(entries)
    assert f"state_dict contains {n} entries, while 2 loss_scalers are used" in caplog.text
    found = [entry["loss_scale"] for entry in session.state_dict().values()]
    assert found == {0: [65536.0, 65536.0], 1: [8.0, 65536.0], 3: [8.0, 8.0]}[n]


GOOD = {"loss_scale": 8.0, "unskipped": 0}
BAD_ENTRIES = [
    ({"loss_scale": torch.ones(2)}, AmpTypeError, "loss_scale must be a number"),
    ({"loss_scale": "4"}, AmpTypeError, "loss_scale must be a number"),
    ({"unskipped": -1}, AmpValueError, "unskipped is -1"),
    ({"unskipped": 1.5}, AmpTypeError, "unskipped must be an int"),
    ({"hysteresis": -1}, AmpValueError, "hysteresis is -1"),
    ({"warmup": 3}, AmpKeyError, 'has "warmup", which this version of ampctx does not load'),
]


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        (None, AmpTypeError, "state_dict must be a dict, got NoneType"),
        *(
            ({**APEX, key: value}, AmpKeyError, rf'Unexpected key\(s\) in state_dict: .*"{key}"')
            for key, value in {0: GOOD, "loss_scaler²": GOOD, "loss_scaler00": GOOD, "model": {}, **TORCH}.items()
        ),
        ({**APEX, "loss_scaler1": {"loss_scale": 8.0}}, AmpKeyError, r'loss_scaler1.*"?unskipped'),
        ({**APEX, "loss_scaler1": 8.0}, AmpTypeError, "loss_scaler1"),
        *(
            ({**APEX, "loss_scaler1": {**GOOD, **entry}}, error, rf'\["loss_scaler1"\].*{message}')
            for entry, error, message in BAD_ENTRIES
        ),
        (TORCH, AmpValueError, r"holds one loss scale, and num_losses=2.*to_amp_state\(state, num_losses=2"),
    ],
    ids=str,
)
def test_a_bad_checkpoint_changes_nothing(session, state, error, message):
    init(session, 2)
    with pytest.raises(error, match=message):
        session.load_state_dict(state)
    assert session.state_dict() == {"loss_scaler0": FRESH, "loss_scaler1": FRESH}


@pytest.mark.parametrize(
    ("theirs", "flags", "unskipped"),
    [
        (torch.amp.GradScaler("cpu", init_scale=1024.0), [0, 0, 1, 0, 0, 0], 3),
        (GradScaler("cpu", init_scale=1024.0, hysteresis=2), [0, 1, 1, 0], 1),
    ],
    ids=["torch", "ours"],
)
def test_a_state_of_a_grad_scaler_loads_into_amp(session, caplog, theirs, flags, unskipped):
    scales(theirs, flags)
    init(session)
    with caplog.at_level(logging.WARNING, "ampctx"):
        session.load_state_dict(theirs.state_dict())
    assert session.state_dict() == {"loss_scaler0": {"loss_scale": 512.0, "unskipped": unskipped}}
    assert caplog.text == ""


def test_growth_settings_of_torch_are_named_and_left(session, caplog):
    init(session)
    with caplog.at_level(logging.WARNING, "ampctx"):
        session.load_state_dict({**TORCH, "growth_interval": 100, "backoff_factor": 0.25})
    assert "not loaded from the state of a GradScaler" in caplog.text
    assert "backoff_factor=0.25 (here 0.5), growth_interval=100 (here 2000)" in caplog.text
    assert "growth_factor" not in caplog.text
    assert session.state_dict() == APEX
    assert session.loss_scales[0].growth_interval == 2000
    other = {**TORCH, "scale": 64.0, "_growth_tracker": 3}
    for key in TORCH:
        with pytest.raises(AmpKeyError, match=f'no "{key}"'):
            session.load_state_dict({k: v for k, v in other.items() if k != key})
    assert session.state_dict() == APEX


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
    for i, factor in enumerate((1.0, INF, float("nan"))):
        backward(session, model(torch.ones(1, 2)).float().sum() * factor, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        assert session.skipped_steps(optimizer) == i
        assert session.state_dict()["loss_scaler0"]["loss_scale"] == loaded


def test_numbers_come_in_any_type(session):
    init(session)
    kinds = (int, np.int32, np.array, torch.tensor, float, np.float32, np.float64, lambda v: torch.tensor([float(v)]))
    for number, count in zip(kinds, kinds[:4] * 2, strict=True):
        session.load_state_dict({"loss_scaler0": {"loss_scale": number(512), "unskipped": count(17)}})
        loaded = session.state_dict()
        assert loaded == APEX
        assert type(loaded["loss_scaler0"]["loss_scale"]) is float


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
        scales(scaler, [0, 1])
    before = scaler.state_dict()
    scaler.load_state_dict(APEX)
    assert scaler.state_dict() == {**before, "scale": 512.0, "_growth_tracker": 17, "_hysteresis_tracker": 2}
    # 18 clean steps are a window here, and two overflows in a row make it fall.
    assert scales(scaler, [0, 1, 1]) == [2048.0, 2048.0, 512.0]


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        (TWO, AmpValueError, r"2 loss scales \(loss_scaler0, loss_scaler1\).*to_grad_scaler_state"),
        ({"loss_scaler0": {"loss_scale": 4.0}}, AmpKeyError, r'\["loss_scaler0"\].*no "unskipped"'),
        (None, AmpTypeError, "state_dict must be a dict"),
        ([TORCH], AmpTypeError, "state_dict must be a dict"),
    ],
    ids=["two", "bad-entry", "none", "list"],
)
def test_what_a_grad_scaler_cannot_load_changes_nothing(state, error, message):
    scaler = GradScaler("cpu", 64.0)
    with pytest.raises(error, match=message):
        scaler.load_state_dict(state)
    assert scaler.get_scale() == 64.0


def test_numbers_of_torchs_format_may_be_tensors():
    scaler = GradScaler("cpu")
    scaler.load_state_dict({k: torch.tensor(v) for k, v in TORCH.items()})
    assert scaler.state_dict().items() >= TORCH.items()


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
