"""The rule of the loss scale in GradScaler and amp.initialize: test_grad_scaler_parity.py compares it with torch's."""

import math
import pickle

import pytest
import torch
from kit import INF, LEVELS, Probe, backward, parameter, probe, ready, scale_of, scales

from ampctx import AmpError, AmpIndexError, GradScaler
from ampctx._errors import AmpTypeError, AmpValueError
from ampctx.spi import LossScale, only_amp_entry


def test_bounds_hold_and_growth_never_reaches_inf():
    bounded = GradScaler("cpu", init_scale=16.0, min_scale=8.0, max_scale=24.0, growth_interval=1)
    assert scales(bounded, [0, 0, 1, 1, 1]) == [24, 24, 12, 8, 8]
    assert scales(GradScaler("cpu", init_scale=2.0**120, growth_interval=1), [0] * 50)[-1] == 2.0**127


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("scale", "skips"), [(0.1, False), (8.0, True)])
def test_a_static_scale_stays_and_counts_blocks(session, level, scale, skips):
    model, optimizer = probe(session, level, loss_scale=scale, skip_nonfinite=skips)
    clean = 0
    for factor in (1.0, INF, 1.0):
        backward(session, model.loss(factor), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        clean = 0 if skips and factor == INF else clean + 1
        assert session.state_dict() == {"loss_scaler0": {"loss_scale": scale, "unskipped": clean}}
    assert session.skipped_steps(optimizer) == skips
    assert model.weight.isfinite().all() == skips


def test_a_graph_built_before_an_update_runs_backward_after_it(session):
    model, optimizer = probe(session, "O1", loss_scale="dynamic")
    weight = torch.ones((), requires_grad=True)
    with session.scale_loss(weight, optimizer) as kept:
        model.weight.grad = torch.full_like(model.weight, INF)
    kept.backward()
    assert (weight.grad.item(), scale_of(session)) == (4096.0, 2048.0)


def test_gradients_are_multiplied_by_the_nearest_inverse():
    for value in (3.0, 1000.0, 65536.0 * 1.3, 2.0**-126, 2.0**120):
        scaler, optimizer = ready(p := parameter([1.0]), scaler=GradScaler("cpu", init_scale=value))
        scaler.unscale_(optimizer)
        assert p.grad == torch.tensor(value).double().reciprocal().float()


@pytest.mark.parametrize(
    ("low", "high", "first"),
    [(None, 2.0**24, 2.0**16), (None, None, 2.0**16), (None, 128, 128.0), (2.0**20, None, 2.0**20), (1, 4.0, 4.0)],
)
def test_a_dynamic_scale_starts_and_stays_within_its_bounds(session, low, high, first):
    model, optimizer = probe(session, "O1", loss_scale="dynamic", min_loss_scale=low, max_loss_scale=high)
    assert scale_of(session) == first
    for _ in range(40):
        backward(session, model.loss(INF), optimizer)
    assert scale_of(session) == (low or 2.0 ** (math.log2(first) - 40))


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_initialize_takes_the_start_and_the_interval_of_growth(session, level):
    model, optimizer = probe(session, level, 2, loss_scale="dynamic", init_scale=1024, growth_interval=3)
    course = []
    for bad in (0, 0, 0, 0, 1, 0, 0, 0):
        backward(session, model.loss(INF if bad else 1.0), optimizer, loss_id=1)
        optimizer.zero_grad()
        course.append(session.loss_scale(loss_id=1))
    assert course == [1024.0, 1024.0, 2048.0, 2048.0, 1024.0, 1024.0, 1024.0, 2048.0]
    assert session.loss_scale() == session.loss_scale(optimizer, -2) == 1024.0


def test_the_scale_can_be_read_of_any_optimizer_and_loss(session):
    with pytest.raises(AmpError, match="loss_scale was called before amp.initialize"):
        session.loss_scale()
    _, first = probe(session, "O1", loss_scale=8.0)
    _, second = probe(session, "O1", loss_scale="dynamic", init_scale=2.0)
    assert (session.loss_scale(), session.loss_scale(first), session.loss_scale(second)) == (2.0, 8.0, 2.0)
    with pytest.raises(AmpIndexError, match="amp.loss_scale: loss_id is 1, and num_losses=1 was given"):
        session.loss_scale(loss_id=1)
    with pytest.raises(AmpError, match="amp.loss_scale: this SGD did not go through amp.initialize"):
        session.loss_scale(torch.optim.SGD([parameter([1.0])]))
    session.reset()
    probe(session, enabled=False)
    assert session.loss_scale() == 1.0


def test_a_scale_set_by_the_program_may_lie_beyond_the_bounds(session):
    probe(session, "O1", max_loss_scale=8.0)
    session.load_state_dict({"loss_scaler0": {"loss_scale": 2.0**20, "unskipped": 7}})
    assert session.state_dict() == {"loss_scaler0": {"loss_scale": 2.0**20, "unskipped": 7}}
    scaler, _ = ready(parameter([1.0]), scaler=GradScaler("cpu", init_scale=4.0, max_scale=8.0))
    for value in (2.0**20, torch.tensor([32.0])):
        scaler.update(value)
        assert scaler.get_scale() == value


def test_a_static_scale_ignores_the_bounds(session):
    probe(session, "O1", loss_scale=128, min_loss_scale=1024.0)
    assert scale_of(session) == 128.0


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"loss_scale": "automatic"}, AmpValueError, "loss_scale is 'automatic'"),
        ({"loss_scale": 1e300}, AmpValueError, "loss_scale is 1e[+]300"),
        ({"loss_scale": 1e-60}, AmpValueError, "loss_scale is 1e-60"),
        ({"min_loss_scale": 8.0, "max_loss_scale": 4.0}, AmpValueError, "min_loss_scale is 8.0 and max_loss_scale is"),
        ({"min_loss_scale": "8", "max_loss_scale": 16.0}, AmpTypeError, "min_loss_scale must be a number"),
        ({"max_loss_scale": "8"}, AmpTypeError, "max_loss_scale must be a number"),
        ({"init_scale": "8"}, AmpTypeError, "init_scale must be a number, got str"),
        ({"init_scale": 2.0**25}, AmpValueError, "init_scale is 33554432.0, outside of 0.0 to 16777216.0, the"),
        ({"growth_interval": 0}, AmpValueError, "growth_interval is 0, expected an int >= 1"),
        ({"num_losses": 0}, AmpValueError, "num_losses is 0"),
        ({"num_losses": 1.5}, AmpValueError, "num_losses is 1.5"),
        ({"init_scale": 8.0, "loss_scale": 1.0}, AmpValueError, "init_scale=8.0 is for a dynamic .* Pass loss_scale="),
        (
            {"growth_interval": 9, "loss_scale": 8.0, "skip_nonfinite": True},
            AmpValueError,
            "and loss_scale=8.0 is static: it stays at that number",
        ),
    ],
    ids=str,
)
def test_errors_of_initialize(session, options, kind, message):
    model = Probe()
    with pytest.raises(kind, match=message):
        session.initialize(model, opt_level="O2", verbosity=0, **options)
    assert session.policy is None
    assert model.weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"init_scale": 0.0}, AmpValueError, "init_scale is 0.0"),
        ({"init_scale": "8"}, AmpTypeError, "init_scale must be a number, got str"),
        ({"init_scale": True}, AmpTypeError, "init_scale must be a number, got bool"),
        ({"growth_factor": 1.0}, AmpValueError, "The growth factor must be > 1.0"),
        ({"growth_factor": INF}, AmpValueError, "growth_factor is inf"),
        ({"backoff_factor": 1.0}, AmpValueError, "The backoff factor must be < 1.0"),
        ({"backoff_factor": 0.0}, AmpValueError, "backoff_factor is 0.0"),
        ({"growth_interval": 0}, AmpValueError, "growth_interval is 0"),
        ({"growth_interval": 2.5}, AmpTypeError, "growth_interval must be an int, got float"),
        ({"growth_interval": 2**31}, AmpValueError, "that fits int32"),
        ({"hysteresis": 0}, AmpValueError, "hysteresis is 0"),
        ({"min_scale": -1.0}, AmpValueError, "min_scale is -1.0"),
        ({"min_scale": math.nan}, AmpValueError, "min_scale is nan"),
        ({"min_scale": 8.0, "max_scale": 4.0}, AmpValueError, "expected 0 <= min_scale <= max_scale"),
        ({"init_scale": 2.0, "min_scale": 4.0}, AmpValueError, "init_scale is 2.0, outside of 4.0 to inf"),
        ({"init_scale": 2.0, "max_scale": 1.0}, AmpValueError, "outside of 0.0 to 1.0, the bounds by min_scale"),
    ],
    ids=str,
)
def test_errors_of_grad_scaler(options, kind, message):
    with pytest.raises(kind, match=message):
        GradScaler("cpu", **{"init_scale": 16.0, **options})


@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan, 1e300, 1e-60])
def test_a_scale_that_cannot_scale_is_refused_at_every_door(session, value):
    scaler, _ = ready(parameter([1.0]))
    with pytest.raises(AmpValueError, match="loss_scale is"):
        scaler.update(value)
    assert scaler.get_scale() == 8.0
    probe(session, "O1")
    with pytest.raises(AmpValueError, match=r'\["loss_scaler0"\]: loss_scale is'):
        session.load_state_dict({"loss_scaler0": {"loss_scale": value, "unskipped": 1}})
    assert scale_of(session) == 4096.0


# --- LossScale of ampctx.spi ------------------------------------------------------------------------------------------


def test_what_it_refuses():
    dynamic, static = LossScale(2.0, dynamic=True), LossScale(2.0, dynamic=False)
    for call, kind, message in (
        (lambda: dynamic.set(torch.ones(2)), AmpValueError, "takes a tensor, of one element"),
        (lambda: static.set(torch.ones(1)), AmpValueError, "takes a tensor, of one element"),
        (lambda: only_amp_entry({"loss_scaler0": []}), AmpTypeError, "must be a dict, got list"),
        (lambda: LossScale.from_option(None, None, None), AmpTypeError, "loss_scale must be a number"),
    ):
        with pytest.raises(kind, match=message):
            call()


def test_a_static_scale_counts_clean_updates_alone():
    scale = LossScale(8.0, dynamic=False)
    for flag in (0.0, 1.0, 0.0):
        scale.update(torch.tensor(flag))
    assert scale.state_dict() == {"loss_scale": 8.0, "unskipped": 2}


def test_its_text_reads_no_accelerator():
    here, there, fixed = LossScale(3.0, dynamic=True), LossScale(3.0, dynamic=True), LossScale(3.0, dynamic=False)
    here.update(torch.tensor(1.0))
    for scale in (there, fixed):
        scale.tensors(torch.device("meta"))
    assert [str(scale) for scale in (here, there, fixed)] == ["1.5", "on meta", "3"]


def test_the_repr_of_a_grad_scaler():
    scaler = GradScaler("cpu", growth_interval=3)
    scaler.scale(torch.ones(1))
    assert repr(scaler) == "GradScaler('cpu', scale 65536, growth_interval=3)"
    assert repr(GradScaler("cpu", enabled=False)) == "GradScaler(enabled=False)"


def test_a_pickle_has_numbers_which_load_on_any_device():
    scaler = GradScaler("cpu", hysteresis=2)
    scaler.scale(torch.ones(1))
    assert b"_rebuild_tensor" not in pickle.dumps(scaler)


def test_its_state_has_what_is_left_of_the_hysteresis():
    first, second = (LossScale(scale, dynamic=True, hysteresis=2) for scale in (1024.0, 4.0))
    first.update(torch.tensor(1.0))
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict() == {"loss_scale": 1024.0, "unskipped": 0, "hysteresis": 1}
    second.update(torch.tensor(1.0))
    assert second.value() == 512.0
