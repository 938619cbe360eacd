import copy
import math
import pickle

import pytest
import torch
from host_reads import HostReads

from ampctx._errors import AmpError, AmpKeyError, AmpTypeError, AmpValueError
from ampctx.scaling.loss_scale import LossScale

CLEAN, OVERFLOW = torch.tensor(0.0), torch.tensor(1.0)


def dynamic(init_scale=1024.0, **kwargs):
    return LossScale(init_scale, dynamic=True, **kwargs)


def after(scale, flags):
    """The scale and the clean count after each flag."""
    seen = []
    for flag in flags:
        scale.update(torch.tensor(float(flag)))
        seen.append((scale.value(), scale.unskipped()))
    return seen


# --- the rule ------------------------------------------------------------------------------------------------------


def test_grows_after_the_interval_and_starts_counting_again():
    scale = dynamic(growth_interval=3)
    assert after(scale, [0, 0, 0, 0]) == [(1024, 1), (1024, 2), (2048, 0), (2048, 1)]


def test_backs_off_and_starts_counting_again_at_an_overflow():
    scale = dynamic(growth_interval=3)
    assert after(scale, [0, 0, 1, 0]) == [(1024, 1), (1024, 2), (512, 0), (512, 1)]


@pytest.mark.parametrize("flag", [1.0, 2.0, -1.0, math.nan, math.inf])
def test_any_flag_but_zero_is_an_overflow(flag):
    scale = dynamic()
    scale.update(torch.tensor(flag))
    assert scale.value() == 512.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_flag_of_shape_1_in_fp32_and_int32(dtype):
    scale = dynamic()
    scale.update(torch.ones(1, dtype=dtype))
    assert scale.value() == 512.0


def test_factors_are_those_given():
    scale = dynamic(64.0, growth_factor=4.0, backoff_factor=0.125, growth_interval=1)
    assert after(scale, [0, 1]) == [(256, 0), (32, 0)]


def test_bounds_hold():
    scale = dynamic(16.0, min_scale=8.0, max_scale=24.0, growth_interval=1)
    assert [s for s, _ in after(scale, [0, 0, 1, 1, 1])] == [24, 24, 12, 8, 8]


def test_a_thousand_overflows_never_reach_zero():
    scale = dynamic()
    for _ in range(1000):
        scale.update(OVERFLOW)
    assert scale.value() > 0
    assert math.isfinite(scale.inv_scale().value.item())


def test_growth_never_reaches_inf():
    scale = dynamic(2.0**120, growth_interval=1)
    for _ in range(50):
        scale.update(CLEAN)
    assert scale.value() == 2.0**127


def test_hysteresis_waits_for_overflows_in_a_row():
    scale = dynamic(hysteresis=3)
    assert [s for s, _ in after(scale, [1, 1, 0, 1, 1, 1, 1, 0, 1])] == [1024] * 5 + [512, 256, 256, 256]


def test_static_scale_stays_and_counts_clean_updates():
    scale = LossScale(128.0, dynamic=False)
    assert after(scale, [0, 1, 0]) == [(128, 1), (128, 1), (128, 2)]


# --- state on the device -------------------------------------------------------------------------------------------


def test_state_appears_on_the_first_device_asked_for():
    scale = dynamic()
    assert (scale.scale, scale.growth_tracker, scale.hysteresis_tracker) == (None, None, None)
    assert torch.equal(scale.scale_on("cpu"), torch.tensor(1024.0))
    assert (scale.scale.dtype, scale.growth_tracker.dtype, scale.hysteresis_tracker.dtype) == (
        torch.float32,
        torch.int32,
        torch.int32,
    )
    assert scale.scale.shape == scale.growth_tracker.shape == scale.hysteresis_tracker.shape == ()


def test_another_device_gets_a_copy_kept_until_the_scale_moves():
    scale = dynamic()
    scale.scale_on("cpu")
    copy_there = scale.scale_on("meta")
    assert copy_there.device.type == "meta"
    assert scale.scale_on("meta") is copy_there
    scale.update(OVERFLOW)
    assert scale.scale_on("meta") is not copy_there


def test_copies_and_inverse_follow_the_scale():
    scale = dynamic()
    assert scale.scale_on("cpu").item() == 1024.0
    assert scale.inv_scale() is scale.inv_scale()
    assert scale.inv_scale().value.item() == 1 / 1024
    scale.update(OVERFLOW)
    assert scale.inv_scale().value.item() == 1 / 512
    assert scale.scale_on("cpu").item() == 512.0


def test_a_graph_built_before_an_update_runs_backward_after_it():
    scale = dynamic()
    x = torch.ones((), requires_grad=True)
    scaled = x * scale.scale_on("cpu")
    scale.update(OVERFLOW)
    scaled.backward()
    assert x.grad.item() == 1024.0


def test_inverse_is_the_nearest_fp32():
    for value in (3.0, 1000.0, 65536.0 * 1.3, 2.0**-126, 2.0**120):
        scale = dynamic(value)
        exact = scale.scale_on("cpu").double().reciprocal().float()
        assert torch.equal(scale.inv_scale().value, exact)


def test_inverse_before_a_device_is_known_is_an_error():
    with pytest.raises(AmpError, match="before scale_on"):
        dynamic().inv_scale()


@pytest.mark.parametrize("is_dynamic", [True, False], ids=["dynamic", "static"])
def test_no_host_read_in_a_training_step(is_dynamic):
    scale = LossScale(8.0, dynamic=is_dynamic)
    with HostReads() as reads:
        for _ in range(3):
            scale.scale_on("cpu")
            scale.inv_scale()
            scale.update(CLEAN)
            _ = scale.is_identity
    assert reads.count == 0


# --- values from the host ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_dynamic", [True, False], ids=["dynamic", "static"])
@pytest.mark.parametrize("on_device", [True, False], ids=["on a device", "on none"])
def test_set_replaces_the_scale_beyond_its_bounds(is_dynamic, on_device):
    scale = LossScale(4.0, dynamic=is_dynamic, max_scale=8.0)
    if on_device:
        scale.scale_on("cpu")
    scale.set(2**20)
    assert scale.value() == 2.0**20
    assert scale.scale_on("cpu").item() == 2.0**20
    scale.set_unskipped(7)
    assert scale.unskipped() == 7


def test_static_value_needs_no_read_and_is_exact():
    scale = LossScale(0.1, dynamic=False)
    scale.scale_on("cpu")
    with HostReads() as reads:
        assert scale.value() == 0.1
    assert reads.count == 0


def test_set_takes_a_tensor_without_a_read():
    scale = dynamic()
    with HostReads() as reads:
        scale.set(torch.tensor([32.0]))
    assert reads.count == 0
    assert scale.value() == 32.0


@pytest.mark.parametrize(("is_dynamic", "n"), [(True, 2), (False, 1)], ids=["two elements", "static"])
def test_set_refuses_other_tensors(is_dynamic, n):
    scale, value = LossScale(2.0, dynamic=is_dynamic), torch.ones(n)
    with pytest.raises(AmpValueError, match="only a dynamic loss scale takes a tensor, of one element"):
        scale.set(value)


@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan, 1e300, 1e-60])
def test_set_refuses_what_cannot_scale(value):
    scale = dynamic()
    with pytest.raises(AmpValueError, match="loss_scale is"):
        scale.set(value)
    assert scale.value() == 1024.0


def test_identity_is_static_and_one():
    assert LossScale(1.0, dynamic=False).is_identity
    assert not LossScale(2.0, dynamic=False).is_identity
    assert not dynamic(1.0).is_identity
    scale = LossScale(2.0, dynamic=False)
    scale.set(1)
    assert scale.is_identity


# --- options of amp.initialize -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "start"),
    [(None, 2.0**24, 2.0**16), (None, None, 2.0**16), (None, 128, 128.0), (2.0**20, None, 2.0**20), (1, 4.0, 4.0)],
)
def test_dynamic_option_starts_within_the_bounds(low, high, start):
    scale = LossScale.from_option("dynamic", low, high)
    assert scale.dynamic
    assert scale.value() == start
    for _ in range(40):
        scale.update(OVERFLOW)
    assert scale.value() == (low or 2.0 ** (math.log2(start) - 40))


def test_static_option_ignores_the_bounds():
    scale = LossScale.from_option(128, 1024.0, None)
    assert not scale.dynamic
    assert scale.value() == 128.0


@pytest.mark.parametrize(
    ("option", "low", "high", "kind", "message"),
    [
        ("automatic", None, None, AmpValueError, 'loss_scale is "automatic"'),
        (0.0, None, None, AmpValueError, "loss_scale is 0.0"),
        (None, None, None, AmpTypeError, "loss_scale must be a number"),
        ("dynamic", 8.0, 4.0, AmpValueError, "min_loss_scale is 8.0 and max_loss_scale is 4.0"),
        ("dynamic", "8", 16.0, AmpTypeError, "min_loss_scale must be a number"),
        ("dynamic", None, "8", AmpTypeError, "max_loss_scale must be a number"),
    ],
)
def test_option_errors(option, low, high, kind, message):
    with pytest.raises(kind, match=message):
        LossScale.from_option(option, low, high)


@pytest.mark.parametrize(
    ("kwargs", "kind", "message"),
    [
        ({"init_scale": 0.0}, AmpValueError, "init_scale is 0.0"),
        ({"init_scale": "8"}, AmpTypeError, "init_scale must be a number, got str"),
        ({"init_scale": True}, AmpTypeError, "init_scale must be a number, got bool"),
        ({"growth_factor": 1.0}, AmpValueError, "The growth factor must be > 1.0"),
        ({"growth_factor": math.inf}, AmpValueError, "growth_factor is inf"),
        ({"backoff_factor": 1.0}, AmpValueError, "The backoff factor must be < 1.0"),
        ({"backoff_factor": 0.0}, AmpValueError, "backoff_factor is 0.0"),
        ({"growth_interval": 0}, AmpValueError, "growth_interval is 0"),
        ({"growth_interval": 2.5}, AmpTypeError, "growth_interval must be an int, got float"),
        ({"growth_interval": 2**31}, AmpValueError, "that fits int32"),
        ({"hysteresis": 0}, AmpValueError, "hysteresis is 0"),
        ({"min_scale": -1.0}, AmpValueError, "min_scale is -1.0"),
        ({"min_scale": math.nan}, AmpValueError, "min_scale is nan"),
        ({"min_scale": 8.0, "max_scale": 4.0}, AmpValueError, "expected 0 <= min_scale <= max_scale"),
        ({"init_scale": 2.0, "min_scale": 4.0}, AmpValueError, "init_scale is 2.0, outside min_scale=4.0"),
        ({"init_scale": 2.0, "max_scale": 1.0}, AmpValueError, "and max_scale=1.0"),
    ],
)
def test_constructor_errors(kwargs, kind, message):
    with pytest.raises(kind, match=message):
        LossScale(**{"init_scale": 16.0, "dynamic": True, **kwargs})


@pytest.mark.parametrize(
    ("flag", "kind", "message"),
    [(1.0, AmpTypeError, "found_inf must be a tensor"), (torch.zeros(2), AmpValueError, "found_inf has 2 elements")],
    ids=["float", "two elements"],
)
def test_update_errors(flag, kind, message):
    with pytest.raises(kind, match=message):
        dynamic().update(flag)


# --- checkpoints ---------------------------------------------------------------------------------------------------


def test_state_dict_is_in_the_format_of_apex():
    scale = dynamic()
    after(scale, [1, 0, 0])
    assert scale.state_dict() == {"loss_scale": 512.0, "unskipped": 2}


@pytest.mark.parametrize("on_device", [True, False], ids=["on a device", "on none"])
def test_state_round_trip_goes_on_identically(on_device):
    flags = [1, 0, 0, 1, 1, 0, 0, 0, 1]
    first = dynamic(growth_interval=3, hysteresis=2)
    after(first, [1, 0, 0, 0, 1])
    second = dynamic(4.0, growth_interval=3, hysteresis=2)
    if on_device:
        second.scale_on("cpu")
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict() == {"loss_scale": 2048.0, "unskipped": 0, "hysteresis": 1}
    assert after(second, flags) == after(first, flags)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("is_dynamic", [True, False], ids=["dynamic", "static"])
def test_copies_are_whole_and_independent(clone, is_dynamic):
    first = LossScale(16.0, dynamic=is_dynamic, growth_interval=3, hysteresis=2, min_scale=2.0, max_scale=64.0)
    after(first, [0, 1])
    second = clone(first)
    before = first.state_dict()
    assert second.state_dict() == before
    flags = [1, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    went = after(second, flags)
    assert first.state_dict() == before
    assert after(first, flags) == went


@pytest.mark.parametrize(
    ("state", "kind", "message"),
    [
        ([], AmpTypeError, "must be a dict, got list"),
        ({"unskipped": 1}, AmpKeyError, 'no "loss_scale", only'),
        ({"loss_scale": 2.0}, AmpKeyError, 'no "unskipped", only'),
        ({"loss_scale": 0.0, "unskipped": 1}, AmpValueError, "loss_scale is 0.0"),
        ({"loss_scale": "2", "unskipped": 1}, AmpTypeError, "loss_scale must be a number"),
        ({"loss_scale": 2.0, "unskipped": -1}, AmpValueError, "unskipped is -1"),
        ({"loss_scale": 2.0, "unskipped": 1.5}, AmpTypeError, "unskipped must be an int"),
        ({"loss_scale": 2.0, "unskipped": 1, "hysteresis": -1}, AmpValueError, "hysteresis is -1"),
    ],
)
def test_bad_state_changes_nothing(state, kind, message):
    scale = dynamic(hysteresis=2)
    after(scale, [0, 0])
    before = scale.state_dict()
    with pytest.raises(kind, match=message):
        scale.load_state_dict(state)
    assert scale.state_dict() == before
