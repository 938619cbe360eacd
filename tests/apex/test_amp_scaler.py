"""apex.amp.scaler.LossScaler: one of its own, and the view on a scale of the session."""

import pytest
import torch
from amp_models import backward, probe
from apex import amp
from apex.amp import _amp_state
from apex.amp.scaler import LossScaler
from host_reads import HostReads
from kit import each_copy

from ampctx import AmpTypeError, AmpValueError


def flag(value):
    return torch.tensor([value], dtype=torch.int32)


# --- one of its own ---------------------------------------------------------------------------------------------------


def test_defaults():
    scaler = LossScaler("dynamic")
    assert scaler.dynamic is True
    assert (scaler.loss_scale(), scaler._loss_scale) == (65536.0, 65536.0)
    assert (scaler._min_loss_scale, scaler._max_loss_scale, scaler._scale_seq_len) == (None, 2.0**24, 2000)
    assert (scaler._unskipped, scaler._has_overflow) == (0, False)
    assert scaler._overflow_buf.dtype == torch.int32
    assert scaler._overflow_buf.tolist() == [0]


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        (("much",), AmpTypeError, "init_scale must be a number"),
        ((0.0,), AmpValueError, "init_scale is 0.0"),
        (("dynamic", 2.0**16, 2.0, 2000, 8.0, 4.0), AmpValueError, "min_loss_scale is 8.0 and max_loss_scale is 4.0"),
    ],
)
def test_bad_arguments(args, error, message):
    with pytest.raises(error, match=message):
        LossScaler(*args)


def _rule(scale, unskipped, overflow, window, low, high):
    """apex's rule, on numbers."""
    if overflow:
        return max(scale / 2, low), 0
    if unskipped + 1 == window:
        return min(scale * 2, high), 0
    return scale, unskipped + 1


@pytest.mark.parametrize("by", ["buffer", "swapped buffer", "has_overflow"])
def test_update_scale_follows_the_rule(by):
    scaler = LossScaler("dynamic", init_scale=16.0, scale_window=3, min_loss_scale=4.0, max_loss_scale=32.0)
    if by == "swapped buffer":
        scaler._overflow_buf = mine = flag(0)
    expected = (16.0, 0)
    generator = torch.Generator().manual_seed(0)
    for overflow in [False] * 8 + [True] * 5 + (torch.rand(40, generator=generator) < 0.2).tolist():
        scaler.clear_overflow_state()
        assert scaler._overflow_buf.tolist() == [0]
        if by == "has_overflow":
            scaler._has_overflow = overflow
        else:
            scaler._overflow_buf.fill_(int(overflow))
        result = scaler.update_scale()
        assert result is overflow
        assert scaler._has_overflow is overflow
        expected = _rule(*expected, overflow, 3, 4.0, 32.0)
        assert (scaler.loss_scale(), scaler._unskipped) == expected
    if by == "swapped buffer":
        assert scaler._overflow_buf is mine


def test_a_static_scale_counts_and_never_overflows():
    scaler = LossScaler(128.0)
    scaler._overflow_buf = flag(1)
    assert scaler.update_scale() is False
    assert scaler.update_scale() is False
    assert (scaler.dynamic, scaler.loss_scale(), scaler._unskipped) == (False, 128.0, 2)


def test_attributes_can_be_written():
    scaler = LossScaler("dynamic")
    scaler._min_loss_scale, scaler._max_loss_scale, scaler._scale_seq_len = 8.0, None, 1
    assert (scaler._min_loss_scale, scaler._max_loss_scale) == (8.0, None)
    scaler._max_loss_scale = 16.0
    scaler._loss_scale = 12
    scaler.update_scale()
    assert scaler.loss_scale() == 16.0
    scaler.dynamic = False
    scaler._has_overflow = True
    assert (scaler.update_scale(), scaler.loss_scale(), scaler.dynamic) == (False, 16.0, False)
    with pytest.raises(AmpValueError, match="loss_scale is 0.0"):
        scaler._loss_scale = 0.0
    with pytest.raises(AmpTypeError, match="_overflow_buf must be a one-element tensor"):
        scaler._overflow_buf = torch.zeros(2)
    with pytest.raises(AmpValueError, match="min_loss_scale is 32.0 and max_loss_scale is 16.0"):
        scaler._min_loss_scale = 32.0


# --- unscaling --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("buffer", ["fresh", "read", "assigned"])
@pytest.mark.parametrize("bad", [None, float("inf"), float("nan")], ids=str)
def test_unscale(bad, buffer):
    scaler = LossScaler("dynamic", init_scale=8.0)
    if buffer == "read":
        assert scaler._overflow_buf.item() == 0
    elif buffer == "assigned":
        scaler._overflow_buf = flag(0)
    model = [torch.full((3,), 16.0, dtype=torch.float16), torch.full((2,), 4.0)]
    if bad is not None:
        model[0][1] = bad
    master = [torch.zeros(3), torch.zeros(2)]
    scaler.clear_overflow_state()
    with HostReads() as reads:
        scaler.unscale([model[0], None, model[1]], [master[0], torch.ones(1), master[1]], None)
        scaler.unscale(model[1:], model[1:], 8.0)  # a clean call does not take the flag back
    assert reads.count == 0
    assert master[1].tolist() == [0.5, 0.5]
    assert master[0][0].item() == 2.0
    assert model[1].tolist() == [0.5, 0.5]
    assert scaler._overflow_buf.tolist() == [int(bad is not None)]
    assert scaler.update_scale() is (bad is not None)


@pytest.mark.parametrize(
    ("scale", "options", "written"),
    [
        (2.0, {"models_are_masters": True}, 4.0),
        (2.0, {"models_are_masters": True, "scale_override": 4.0}, 2.0),
        (1.0, {"models_are_masters": True}, 0.0),
        (1.0, {}, 8.0),
    ],
)
def test_unscale_by_a_static_scale(scale, options, written):
    """Nothing is written where the scale is 1 and the masters are the model's."""
    master = torch.zeros(2)
    LossScaler(scale).unscale([torch.full((2,), 8.0)], [master], None, **options)
    assert master.tolist() == [written] * 2


def test_unscale_with_stashed():
    scaler = LossScaler("dynamic", init_scale=8.0)
    model, stashed, master = torch.full((2,), 16.0), torch.full((2,), float("inf")), torch.zeros(2)
    scaler.clear_overflow_state()
    scaler.unscale_with_stashed([model], [torch.ones(2)], [master])
    assert master.tolist() == [3.0, 3.0]
    scaler.unscale_with_stashed([model], [torch.ones(2)], [master], scale_override=(4.0, 2.0, 8.0))
    assert master.tolist() == [36.0, 36.0]
    scaler.unscale_with_stashed([model], [stashed], [master])
    assert scaler.update_scale() is False  # what was there is not looked at
    scaler.unscale_with_stashed([stashed], [model], [master])
    assert scaler.update_scale() is True


# --- copies -----------------------------------------------------------------------------------------------------------


@each_copy
@pytest.mark.parametrize("kind", ["own", "static", "view"])
def test_a_copy_has_a_scale_of_its_own(kind, copied):
    if kind == "view":
        probe(min_loss_scale=2.0)
    scaler = {
        "own": lambda: LossScaler("dynamic", scale_factor=4.0, scale_window=5, min_loss_scale=2.0),
        "static": lambda: LossScaler(128.0),
        "view": lambda: _amp_state.loss_scalers[0],
    }[kind]()
    scaler._loss_scale, scaler._unskipped, scaler.mine = 2**20, 3, "kept"
    twin = copied(scaler)
    names = ("dynamic", "_loss_scale", "_unskipped", "_min_loss_scale", "_max_loss_scale", "_scale_seq_len", "mine")
    for name in names:
        assert getattr(twin, name) == getattr(scaler, name), name
    twin._has_overflow = True
    twin.update_scale()
    assert scaler._loss_scale == 2**20
    if kind != "static":
        assert twin._loss_scale == 2**20 / (4.0 if kind == "own" else 2.0)


def test_the_state_of_a_pickle_of_apex():
    scaler = LossScaler.__new__(LossScaler)
    scaler.__setstate__(
        {
            "dynamic": True,
            "_loss_scale": 32768.0,
            "_max_loss_scale": 2.0**24,
            "_min_loss_scale": None,
            "_scale_seq_len": 2000,
            "_unskipped": 17,
            "_has_overflow": 0,
            "_overflow_buf": flag(0),
        }
    )
    assert (scaler.loss_scale(), scaler._unskipped, scaler._has_overflow) == (32768.0, 17, False)


# --- the flag of the session ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_the_buffer_shows_the_latest_flag(level):
    model, optimizer = probe(level)
    scaler = _amp_state.loss_scalers[0]
    for factor, shown in [(1.0, 0), (float("inf"), 1), (float("nan"), 1), (1.0, 0)]:
        with HostReads() as reads:
            backward(model, optimizer, factor)
            buffer = scaler._overflow_buf
        assert reads.count == 0
        assert buffer.dtype == torch.int32
        assert buffer.tolist() == [shown]
        assert bool(scaler._has_overflow) is bool(shown)
        optimizer.zero_grad()


@pytest.mark.parametrize("factors", [["inf"], ["inf", "1"]], ids=["one", "several"])
def test_has_overflow_waits_for_update_scale_after_delayed_checks(factors):
    """An overflow in any of them counts: apex looked at the last and stepped on gradients that were not finite."""
    model, optimizer = probe()
    scaler = _amp_state.loss_scalers[0]
    for factor in map(float, factors):
        backward(model, optimizer, factor, delay_overflow_check=True)
    assert not scaler._has_overflow
    assert scaler.loss_scale() == 4096.0
    assert scaler.update_scale() is True
    assert scaler._has_overflow is True
    assert scaler.loss_scale() == 2048.0
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 2048.0, "unskipped": 0}
