"""GradScaler's errors, the disabled scaler, bounds and hysteresis, and checkpoints."""

import pickle

import pytest
import torch
from kit import each_copy, parameter, ready, scales

from ampctx import GradScaler
from ampctx._errors import AmpAssertionError, AmpError, AmpKeyError, AmpTypeError, AmpValueError

# --- errors ---------------------------------------------------------------------------------------------------------


def unscale_twice(scaler, optimizer):
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)


def unscale_after_step(scaler, optimizer):
    scaler.step(optimizer)
    scaler.unscale_(optimizer)


def step_twice(scaler, optimizer):
    scaler.step(optimizer)
    scaler.step(optimizer)


def update_without_gradients(scaler, optimizer):
    optimizer.zero_grad()
    scaler.unscale_(optimizer)
    scaler.update()


ORDER = [
    (unscale_twice, RuntimeError, r"unscale_\(\) has already been called on this optimizer since the last update\(\)"),
    (unscale_after_step, RuntimeError, r"unscale_\(\) is being called after step\(\)"),
    (step_twice, RuntimeError, r"step\(\) has already been called since the last update\(\)"),
    (update_without_gradients, AssertionError, "No inf checks were recorded prior to update"),
    (lambda s, o: s.update(), AssertionError, "No inf checks were recorded prior to update"),
    (lambda s, o: s.step(o, closure=None), RuntimeError, "Closure use is not currently supported"),
    (lambda s, o: s.update(torch.ones(2)), AssertionError, "new_scale should be a float or a 1-element"),
    (lambda s, o: s.update(torch.ones(1, requires_grad=True)), AssertionError, "with requires_grad=False"),
    (lambda s, o: s.update(torch.ones(1, device="meta")), AssertionError, "new_scale should be a float"),
    (lambda s, o: s.load_state_dict({}), RuntimeError, "The source state dict is empty"),
    (lambda s, o: (s.unscale_(o), pickle.dumps(s)), AssertionError, "may only be pickled at the beginning"),
]


@pytest.mark.parametrize(("call", "kind", "message"), ORDER, ids=range(len(ORDER)))
@pytest.mark.parametrize("scaler_class", [GradScaler, torch.amp.GradScaler], ids=["ours", "torch"])
def test_errors_are_those_of_torch(scaler_class, call, kind, message):
    scaler, optimizer = ready(parameter([8.0]), scaler=scaler_class("cpu"))
    with pytest.raises(kind, match=message) as raised:
        call(scaler, optimizer)
    assert isinstance(raised.value, AmpError) == (scaler_class is GradScaler)


@pytest.mark.parametrize("name", ["unscale_", "step", "_check_inf_per_device"])
def test_calls_before_scale_are_errors(name):
    optimizer = torch.optim.SGD([parameter([1.0])])
    with pytest.raises(AmpAssertionError, match=r"Attempted .* but _scale is None"):
        getattr(GradScaler("cpu"), name)(optimizer)
    with pytest.raises(AmpAssertionError, match="Attempted update but _scale is None"):
        GradScaler("cpu").update()


def test_a_closure_by_position_is_an_error_too():
    scaler, optimizer = ready(parameter([1.0]))
    with pytest.raises(AmpError, match="Closure use is not currently supported"):
        scaler.step(optimizer, lambda: None)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda s: s.update("8"), AmpTypeError, "loss_scale must be a number"),
        (lambda s: s.set_growth_factor(1.0), AmpValueError, "The growth factor must be > 1.0"),
        (lambda s: s.set_backoff_factor(1.0), AmpValueError, "The backoff factor must be < 1.0"),
        (lambda s: s.set_growth_interval(0), AmpValueError, "growth_interval is 0"),
        (lambda s: GradScaler(0), AmpTypeError, "device must be a device type"),
    ],
)
def test_values_are_checked(call, kind, message):
    scaler, _ = ready(parameter([1.0]))
    with pytest.raises(kind, match=message):
        call(scaler)
    assert scaler.state_dict() == {**GradScaler("cpu", init_scale=8.0).state_dict()}


# --- disabled ------------------------------------------------------------------------------------------------------


def test_disabled_passes_everything_through():
    p = parameter([8.0])
    scaler = GradScaler("cpu", init_scale=0.0, enabled=False)
    optimizer = torch.optim.SGD([p], lr=0.125)
    outputs = object()
    assert scaler.scale(outputs) is outputs
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update(4.0)
    scaler.load_state_dict({})
    scaler.set_growth_interval(5)
    assert p.item() == 0.0
    assert not scaler.is_enabled()
    assert (scaler.get_scale(), scaler._get_growth_tracker(), scaler.state_dict()) == (1.0, 0, {})
    assert not hasattr(scaler, "_scale")
    assert pickle.loads(pickle.dumps(scaler)).is_enabled() is False


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is available")
def test_without_cuda_the_default_warns_and_is_disabled():
    with pytest.warns(UserWarning, match="CUDA is not available. Disabling"):
        scaler = GradScaler()
    assert not scaler.is_enabled()
    assert not GradScaler(enabled=False).is_enabled()


# --- bounds, hysteresis, checkpoints -------------------------------------------------------------------------------


def configured():
    return GradScaler("cpu", 64.0, 4.0, 0.25, 3, min_scale=0.5, max_scale=4096.0, hysteresis=3)


STATE = {
    "scale": 16.0,
    "growth_factor": 4.0,
    "backoff_factor": 0.25,
    "growth_interval": 3,
    "_growth_tracker": 0,
    "min_scale": 0.5,
    "max_scale": 4096.0,
    "hysteresis": 3,
    "_hysteresis_tracker": 0,
    "format": 1,
}


@pytest.mark.parametrize("live", [True, False], ids=["live", "fresh"])
def test_state_round_trip_with_no_default_value(live):
    first = configured()
    scales(first, [0, 1, 1, 1])
    assert first.state_dict() == STATE
    second = GradScaler("cpu")
    if live:
        scales(second, [0])
        tensors = (second._scale, second._growth_tracker)
    second.load_state_dict(first.state_dict())
    if live:
        assert (second._scale, second._growth_tracker) == tensors
    assert second.state_dict() == STATE
    flags = [0, 0, 1, 1, 0, 0, 0, 0]
    assert scales(second, flags) == scales(first, flags)


def test_state_of_torchs_keeps_bounds_and_hysteresis():
    theirs = torch.amp.GradScaler("cpu", 32.0, 8.0, 0.125, 7)
    scales(theirs, [0, 0])
    ours = configured()
    scales(ours, [1, 1])
    ours.load_state_dict(theirs.state_dict())
    assert ours.state_dict() == {
        **theirs.state_dict(),
        **{k: STATE[k] for k in ("min_scale", "max_scale", "hysteresis")},
        "_hysteresis_tracker": 3,
        "format": 1,
    }


def test_state_loads_into_torchs():
    ours = configured()
    scales(ours, [1, 1, 1, 0])
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(ours.state_dict())
    assert theirs.state_dict().items() <= ours.state_dict().items()


@each_copy
def test_copies_go_on_alike_and_apart(copied):
    first = configured()
    scales(first, [0, 1, 1, 1])
    second = copied(first)
    went = scales(second, [0, 0, 0, 1, 1, 1])
    assert first.state_dict() == STATE
    assert scales(first, [0, 0, 0, 1, 1, 1]) == went


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        *(({key: None}, AmpKeyError, f'no "{key}"') for key in list(STATE)[:5]),
        ({"scale": 0.0}, AmpValueError, "scale is 0.0"),
        ({"growth_factor": 0.5}, AmpValueError, "growth_factor is 0.5"),
        ({"backoff_factor": 2.0}, AmpValueError, "backoff_factor is 2.0"),
        ({"growth_interval": 0}, AmpValueError, "growth_interval is 0"),
        ({"_growth_tracker": -1}, AmpValueError, "_growth_tracker is -1"),
        ({"min_scale": 1.0, "max_scale": 0.5}, AmpValueError, "expected 0 <= min_scale <= max_scale"),
        ({"hysteresis": 0}, AmpValueError, "hysteresis is 0"),
        ({"_hysteresis_tracker": 1.5}, AmpTypeError, "_hysteresis_tracker must be an int"),
        ({"warmup": 3}, AmpKeyError, 'state_dict has "warmup", which this version of ampctx does not load'),
    ],
    ids=str,
)
def test_bad_state_changes_nothing(change, kind, message):
    scaler = configured()
    before = scaler.state_dict()
    state = {k: v for k, v in {**STATE, **change}.items() if v is not None}
    with pytest.raises(kind, match=message):
        scaler.load_state_dict(state)
    assert scaler.state_dict() == before
