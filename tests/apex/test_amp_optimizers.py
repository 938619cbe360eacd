"""What apex put on an optimizer: ``_amp_stash`` and the private methods, as views on the optimizer's binding."""

import copy

import pytest
import torch
from amp_models import BOTH, backward, probe, same, weights
from apex import amp
from kit import LOW, OPTIMIZERS, Probe, every_level
from processes import output

import ampctx
from ampctx import AmpError, AmpTypeError

with_masters = pytest.mark.parametrize("level", ["O2", "O5"])
both = pytest.mark.parametrize("make", BOTH)
METHODS = ["_lazy_init_maybe_master_weights", "_amp_lazy_init", "_prepare_amp_backward", "_post_amp_backward"]
STAMPS = ["_amp_stash", *METHODS, "_master_params_to_model_params"]


def stamped(optimizer):
    return [name for name in STAMPS if hasattr(optimizer, name)]


# --- when they are there ----------------------------------------------------------------------------------------------


@both
@every_level
def test_from_initialize_to_reset(level, make):
    model = Probe()
    optimizer = OPTIMIZERS[make](model.parameters())
    before = set(vars(optimizer))
    amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    assert stamped(optimizer) == (STAMPS if level in ("O2", "O5") else STAMPS[:-1])
    backward(model, optimizer)
    optimizer.step()
    ampctx.amp.reset()
    assert stamped(optimizer) == []
    assert set(vars(optimizer)) == before
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert stamped(optimizer)


def test_not_where_initialize_is_disabled_or_fails():
    model = Probe()
    optimizer = OPTIMIZERS["SGD-plain"](model.parameters())
    amp.initialize(model, optimizer, enabled=False)
    assert stamped(optimizer) == []
    other = torch.optim.SGD(model.half().parameters(), lr=1.0)
    with pytest.raises(AmpError, match="Found param"):
        amp.initialize(model, [optimizer, other], opt_level="O2", verbosity=0)
    assert stamped(optimizer) == []


IN_FRESH_PROCESS = """
import torch
from ampctx import amp
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
other = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=1.0)
amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
from ampctx_apex import install_apex, uninstall_apex
install_apex()
assert not hasattr(optimizer, "_amp_stash")
import apex.amp
assert apex.amp._amp_state.loss_scalers[0].loss_scale() == 65536.0
for again in range(2):
    assert len(optimizer._amp_stash.all_fp32_from_fp16_params) == 2
    uninstall_apex()
    assert not hasattr(optimizer, "_amp_stash"), "a stamp is left"
    with amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    install_apex()
    import apex.amp
amp.reset()
assert not hasattr(optimizer, "_amp_stash")
uninstall_apex()
amp.initialize(model, other, opt_level="O1", verbosity=0)
assert not hasattr(other, "_amp_stash")
"""


@pytest.mark.full
def test_apex_imported_late_and_uninstalled():
    assert output("-c", IN_FRESH_PROCESS) == ""


# --- the stash --------------------------------------------------------------------------------------------------------


@with_masters
def test_lists_with_master_weights(level):
    model, optimizer = probe(level)
    extra = torch.nn.Parameter(torch.ones(4, dtype=LOW[level]))
    optimizer.add_param_group({"params": [extra]})
    stash = optimizer._amp_stash
    groups = [group["params"] for group in optimizer.param_groups]
    masters = [groups[0][0], groups[1][0]]
    assert [p.dtype for p in masters] == [torch.float32] * 2

    def is_(given, expected):
        return len(given) == len(expected) and all(
            is_(a, b) if isinstance(b, list) else a is b for a, b in zip(given, expected, strict=True)
        )

    norm = list(model.norm.parameters())
    assert is_(stash.fp16_groups, [[model.weight], [extra]])
    assert is_(stash.fp32_from_fp16_groups, [[masters[0]], [masters[1]]])
    assert is_(stash.fp32_from_fp32_groups, [norm, []])
    assert is_(stash.all_fp16_params, [model.weight, extra])
    assert is_(stash.all_fp32_from_fp16_params, masters)
    assert is_(stash.all_fp32_from_fp32_params, norm)
    assert not hasattr(stash, "all_fp32_params")


def test_lists_without_master_weights():
    amp._amp_state.allow_incoming_model_not_fp32 = True
    try:
        model = Probe()
        model.weight.data = model.weight.data.half()
        optimizer = OPTIMIZERS["SGD-plain"](model.parameters())
        amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    finally:
        amp._amp_state.allow_incoming_model_not_fp32 = False
    stash = optimizer._amp_stash
    assert stash.all_fp16_params == [model.weight]
    assert [id(p) for p in stash.all_fp32_params] == [id(p) for p in model.norm.parameters()]
    assert not hasattr(stash, "all_fp32_from_fp16_params")


# --- the methods ------------------------------------------------------------------------------------------------------


@with_masters
def test_master_params_to_model_params(level):
    model, optimizer = probe(level)
    backward(model, optimizer)
    optimizer.step()
    (master,) = optimizer._amp_stash.all_fp32_from_fp16_params
    master.data.copy_(torch.full((3,), 5.0))
    optimizer._master_params_to_model_params()
    assert model.weight.tolist() == [5.0] * 3


def test_resuming_as_the_bert_examples_do():
    """Masters by hand, lazy_init_called set, state loaded into fp32, saved masters copied in."""
    model, optimizer = probe("O2", "FusedAdam")
    for _ in range(2):
        backward(model, optimizer, 1.0 / 3)
        optimizer.step()
        optimizer.zero_grad()
    of_model, of_optimizer = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    masters = weights(optimizer)
    ampctx.amp.reset()
    other, resumed = probe("O2", "FusedAdam")
    other.load_state_dict(of_model)
    resumed._lazy_init_maybe_master_weights()
    resumed._amp_stash.lazy_init_called = True
    resumed.load_state_dict(of_optimizer)
    for p, saved in zip(amp.master_params(resumed), masters, strict=True):
        p.data.copy_(saved)
    assert same(weights(resumed), masters)
    backward(other, resumed, 1.0 / 3)
    assert same(weights(resumed), masters)
    assert resumed.state[resumed.param_groups[0]["params"][0]]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("method", ["_prepare_amp_backward", "_post_amp_backward"])
def test_prepare_and_post_are_refused_inside_a_block_and_without_a_scaler(method):
    model, optimizer = probe()
    args = [amp._amp_state.loss_scalers[0]] if "post" in method else []
    with amp.scale_loss(model.loss(1.0), optimizer) as scaled:
        with pytest.raises(AmpError, match=rf"optimizer.{method}\(\) was called inside a scale_loss block"):
            getattr(optimizer, method)(*args)
        with pytest.raises(AmpError, match="params_have_scaled_gradients was assigned inside a scale_loss block"):
            optimizer._amp_stash.params_have_scaled_gradients = True
        scaled.backward()
    with pytest.raises(AmpTypeError, match="_post_amp_backward takes an apex.amp.scaler.LossScaler"):
        optimizer._post_amp_backward(128.0)
