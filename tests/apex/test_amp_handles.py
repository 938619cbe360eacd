"""Handles on casts op by op: ``amp.init``, and those of O1 and O4."""

import types

import pytest
import torch
import torch.nn.functional as F
from apex import amp
from apex.amp import _amp_state
from kit import Probe

import ampctx

HALF, FLOAT = torch.ones(2, 2, dtype=torch.float16), torch.ones(2, 2)


def dtype_of_mm():
    return torch.mm(FLOAT, FLOAT).dtype


@amp.float_function
def decorated(x):
    return x.dtype


# --- init -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_init_casts_until_deactivate(dtype):
    before = (F.binary_cross_entropy, torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled())
    handle = amp.init(patch_type=dtype)
    assert _amp_state.handle is handle
    assert (handle.is_active(), handle._is_active) == (True, True)
    assert dtype_of_mm() == dtype
    assert torch.softmax(HALF, 1).dtype == torch.float32
    assert decorated(HALF) == torch.float32
    handle._deactivate()
    assert (handle.is_active(), dtype_of_mm()) == (False, torch.float32)
    assert decorated(HALF) == torch.float16
    handle._deactivate()
    assert before == (F.binary_cross_entropy, torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled())
    assert _amp_state.handle is handle  # apex never takes it away


def test_init_leaves_the_rest_alone_and_reset_switches_it_off():
    handle = amp.init()
    assert not hasattr(_amp_state, "opt_properties")
    assert not hasattr(_amp_state, "loss_scalers")
    amp.initialize(Probe(), opt_level="O2", verbosity=0)
    assert _amp_state.opt_properties.opt_level == "O2"
    ampctx.amp.reset()
    assert (dtype_of_mm(), handle.is_active()) == (torch.float32, False)
    assert not hasattr(_amp_state, "handle")
    handle._deactivate()
    assert dtype_of_mm() == torch.float32


def test_registered_functions_are_installed():
    module = types.SimpleNamespace(double=lambda x: x.dtype, mm=torch.mm)
    amp.register_half_function(module, "double")
    amp.register_float_function(module, "mm")
    handle = amp.init()
    assert module.double(FLOAT) == torch.float16
    handle._deactivate()
    assert module.double(FLOAT) == torch.float32
    amp.initialize(Probe(), opt_level="O1", verbosity=0)
    assert (module.double(FLOAT), module.mm(HALF, HALF).dtype) == (torch.float16, torch.float32)
    ampctx.amp.reset()
    assert (module.double(FLOAT), module.mm) == (torch.float32, torch.mm)


def test_disabled():
    handle = amp.init(enabled=False)
    assert not hasattr(_amp_state, "handle")
    handle._clear_cache()
    handle._is_active = True
    handle._deactivate()
    assert (handle.is_active(), dtype_of_mm()) == (False, torch.float32)


# --- a handle's attributes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("made_by", ["init", "O1", "O4"])
def test_is_active_can_be_set(made_by):
    low = torch.bfloat16 if made_by == "O4" else torch.float16
    model = torch.nn.Linear(2, 2)
    if made_by == "init":
        amp.init()
    else:
        amp.initialize(model, opt_level=made_by, verbosity=0)
    handle = _amp_state.handle
    assert handle is _amp_state.handle
    assert model(FLOAT).dtype == dtype_of_mm() == low
    handle._is_active = False
    assert (handle.is_active(), handle._is_active) == (False, False)
    assert model(FLOAT).dtype == dtype_of_mm() == torch.float32
    assert decorated(HALF) == torch.float16
    handle._is_active = True
    assert handle.is_active()
    assert model(FLOAT).dtype == dtype_of_mm() == low
    assert decorated(HALF) == torch.float32


# --- what detection libraries do at import ----------------------------------------------------------------------------


class Pooler:
    @amp.float_function
    def forward(self, x):
        return x.dtype


# A builtin has no __dict__, and the decoration comes before any initialize.
builtin = amp.float_function(torch.ops.aten.sum.default)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4"])
def test_decorated_before_any_initialize(level):
    assert Pooler().forward(HALF) == torch.float16
    amp.initialize(Probe(), opt_level=level, verbosity=0)
    casts = level in ("O1", "O4")
    assert Pooler().forward(HALF) == (torch.float32 if casts else torch.float16)
    assert builtin(HALF).dtype == (torch.float32 if casts else torch.float16)
    assert builtin(FLOAT).item() == 4.0
