"""apex.amp._amp_state shows the default session, and what is written there reaches it."""

import pytest
import torch
from amp_models import Probe, probe
from apex import amp
from apex.amp import _amp_state
from apex.amp._amp_state import AmpState, maybe_print, warn_or_err
from apex.amp.frontend import O3, Properties, opt_levels
from apex.amp.scaler import LossScaler

import ampctx
from ampctx import AmpError
from ampctx.spi import session


@pytest.fixture(autouse=True)
def _state_as_it_was():
    yield
    _amp_state.allow_incoming_model_not_fp32 = False
    _amp_state.verbosity = 1


# --- the state itself -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["opt_properties", "loss_scalers", "handle"])
def test_absent_until_initialize_and_after_reset(name):
    assert not hasattr(_amp_state, name)
    probe("O1", min_loss_scale=2.0)
    assert getattr(_amp_state, name) is not None
    amp.initialize(Probe(), opt_level="O1", verbosity=0)
    session.reset()
    with pytest.raises(AttributeError, match=name if name != "handle" else "neither amp.init nor"):
        getattr(_amp_state, name)


def test_disabled_leaves_no_scales():
    amp.initialize(Probe(), enabled=False, opt_level="O2")
    assert _amp_state.opt_properties.enabled is False
    assert not _amp_state.opt_properties.options["cast_model_type"]
    assert not _amp_state.opt_properties.master_weights
    assert not hasattr(_amp_state, "loss_scalers")


def test_apexs_initialize_prints_apexs_banner_and_ampctxs_one_line(capsys):
    """Whoever has imported apex: a library may have."""
    for positional in ([], [None, True, "O3", None, None, None, None, None, None, 1, 1]):
        amp.initialize(Probe(), *positional, **({} if positional else {"opt_level": "O3"}))
        assert _amp_state.verbosity == 1
        told = capsys.readouterr().out
        assert told.startswith("Selected optimization level O3:  Pure FP16 training.\nDefaults for this")
    ampctx.amp.initialize(Probe(), opt_level="O3")
    assert capsys.readouterr().out == "ampctx: O3: float16 model, no masters, loss scale 1\n"


def test_banner_in_full(capsys):
    for verbosity in (1, 0):
        options = {"loss_scale": "128.0", "keep_batchnorm_fp32": False, "verbosity": verbosity}
        amp.initialize(Probe(), opt_level="O2", **options)
    assert capsys.readouterr().out.splitlines() == [
        "Selected optimization level O2:  FP16 training with FP32 batchnorm and FP32 master weights.",
        "",
        "Defaults for this optimization level are:",
        "enabled                : True",
        "opt_level              : O2",
        "cast_model_type        : torch.float16",
        "patch_torch_functions  : False",
        "keep_batchnorm_fp32    : True",
        "master_weights         : True",
        "loss_scale             : dynamic",
        "Processing user overrides (additional kwargs that are not None)...",
        "After processing overrides, optimization options are:",
        "enabled                : True",
        "opt_level              : O2",
        "cast_model_type        : torch.float16",
        "patch_torch_functions  : False",
        "keep_batchnorm_fp32    : False",
        "master_weights         : True",
        "loss_scale             : 128.0",
    ]


def test_verbosity_both_ways(capsys):
    amp.initialize(Probe(), verbosity=0)
    assert _amp_state.verbosity == 0
    maybe_print("unheard")
    _amp_state.verbosity = 2
    assert session.verbosity == 2
    maybe_print("heard")
    maybe_print("on rank 0", rank0=True)
    assert capsys.readouterr().out == "heard\non rank 0\n"


def test_allow_incoming_model_not_fp32_both_ways():
    model = Probe().half()
    with pytest.raises(RuntimeError, match="Found param weight with type"):
        amp.initialize(model, opt_level="O1", verbosity=0)
    _amp_state.allow_incoming_model_not_fp32 = True
    assert session.allow_incoming_model_not_fp32
    amp.initialize(model, opt_level="O1", verbosity=0)


def test_an_error_by_name_and_other_attributes():
    with pytest.raises(RuntimeError, match="^wrong$"):
        warn_or_err("wrong")
    _amp_state.mine = 5
    assert amp._amp_state.mine == 5
    del _amp_state.mine
    assert not hasattr(AmpState(), "mine")


# --- loss_scalers -----------------------------------------------------------------------------------------------------


def test_loss_scalers_are_a_list_of_views():
    probe(num_losses=3)
    scalers = _amp_state.loss_scalers
    assert len(scalers) == 3
    assert [type(s) for s in scalers] == [LossScaler] * 3
    assert scalers[0] is _amp_state.loss_scalers[0]
    assert scalers[-1] is scalers[2]
    assert scalers[1:] == [scalers[1], scalers[2]]
    with pytest.raises(IndexError):
        scalers[3]
    assert repr(scalers).startswith("[<apex.amp.scaler.LossScaler")


@pytest.mark.parametrize("value", [2**20, 5, 1, 0.25, 2.0**30], ids=str)
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_written_scale_is_in_the_next_block(level, value):
    """Ints and floats, above max_loss_scale too."""
    _, optimizer = probe(level)
    _amp_state.loss_scalers[0]._loss_scale = value
    with amp.scale_loss(torch.tensor(1.0), optimizer) as scaled:
        assert scaled.item() == value
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == value
    assert _amp_state.loss_scalers[0].loss_scale() == _amp_state.loss_scalers[0]._loss_scale == value


@pytest.mark.parametrize("assign", ["item", "slice", "whole"])
def test_an_assigned_scaler_is_what_optimizers_use(assign):
    _, optimizer = probe()
    scaler = LossScaler(128.0)
    if assign == "item":
        _amp_state.loss_scalers[0] = scaler
    elif assign == "slice":
        _amp_state.loss_scalers[:] = [scaler]
    else:
        _amp_state.loss_scalers = [scaler]
    assert _amp_state.loss_scalers[0] is scaler
    with amp.scale_loss(torch.tensor(1.0), optimizer) as scaled:
        assert scaled.item() == 128.0
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 128.0


# --- opt_properties ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "expected"),
    [("O1", (None, True, None)), ("O2", (torch.float16, False, True)), ("O5", (torch.bfloat16, False, True))],
    ids=["O1", "O2", "O5"],
)
def test_opt_properties(level, expected):
    probe(level)
    properties = _amp_state.opt_properties
    options = properties.options
    assert (options["cast_model_type"], properties.patch_torch_functions, properties.master_weights) == expected
    assert (properties.enabled, properties.opt_level, properties.loss_scale) == (True, level, "dynamic")
    assert options.get("cast_model_outputs") is None
    assert options.get("nothing", 3) == 3
    assert list(options)[:2] == ["enabled", "opt_level"]
    assert dict(options) == {name: getattr(properties, name) for name in options}
    assert repr(options) == repr(dict(options))
    assert _amp_state.opt_properties is properties
    with pytest.raises(AttributeError, match="'Properties' object has no attribute 'nothing'"):
        properties.nothing  # noqa: B018


def test_assigning_an_option_reaches_the_session():
    model, optimizer = probe(cast_model_outputs=torch.float16)
    assert _amp_state.opt_properties.options.get("cast_model_outputs") is torch.float16
    _amp_state.opt_properties.enabled = False
    assert session.policy.enabled is False
    loss = model.loss(1.0)
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss
    _amp_state.opt_properties.options["enabled"] = True
    assert session.policy.enabled is True
    _amp_state.opt_properties.mine = 1
    assert _amp_state.opt_properties.mine == 1
    with pytest.raises(AmpError, match="enabled cannot be deleted"):
        del _amp_state.opt_properties.options["enabled"]
    with pytest.raises(KeyError, match="nothing"):
        _amp_state.opt_properties.options["nothing"] = 1


# --- Properties and levels by hand ------------------------------------------------------------------------------------


def test_bare_properties():
    properties = Properties()
    assert (properties.enabled, properties.opt_level, properties.loss_scale) == (False, None, 1.0)
    assert properties.patch_torch_functions is False
    properties._update_options_dict([("enabled", True), ("opt_level", "O1")])
    assert properties.options["opt_level"] == "O1"
    with pytest.raises(ValueError, match="Tried to set unexpected option nothing"):
        properties._update_options_dict([("enabled", False), ("nothing", True)])
    assert properties.enabled is True


@pytest.mark.parametrize("level", opt_levels)
def test_levels(level):
    properties = opt_levels[level](Properties())
    fresh = Probe()
    amp.initialize(fresh, opt_level=level, verbosity=0)
    assert dict(properties.options) == dict(_amp_state.opt_properties.options)
    assert opt_levels[level].brief.startswith(f"{level}:  ")
    assert opt_levels[level].brief.endswith("\n") is (level != "O3")
    assert list(opt_levels) == ["O3", "O2", "O1", "O0", "O4", "O5"]
    assert type(opt_levels["O3"]) is O3


# --- what apex.amp and apex itself have -------------------------------------------------------------------------------


def test_what_programs_import_of_the_rest():
    from apex.amp._initialize import applier, to_type

    one, half, ids = torch.ones(2, 2), torch.ones(2, 2, dtype=torch.float16), torch.arange(2)
    result = applier({"x": [one, (half, ids)], "n": 3}, lambda t: to_type(torch.float16, t))
    assert result["x"][0].dtype == torch.float16
    assert result["x"][1][0] is half
    assert result["x"][1][1] is ids
    assert result["n"] == 3
    assert amp.compat.filter_attrs(torch, ["mm", "nope"]) == ["mm"]
    assert amp.rnn_compat.has_old_rnns() is False


# --- helpers of apex itself -------------------------------------------------------------------------------------------


def test_deprecated_warning_and_check_cudnn_version_and_warn(monkeypatch):
    import apex

    assert issubclass(apex.DeprecatedFeatureWarning, FutureWarning)
    with pytest.warns(apex.DeprecatedFeatureWarning, match="^old$"):
        apex.deprecated_warning("old")
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 8500)
    assert apex.check_cudnn_version_and_warn("--fast", 8500) is True
    with pytest.warns(UserWarning, match="`--fast` needs cuDNN 8600 or later, and this is 8500"):
        assert apex.check_cudnn_version_and_warn("--fast", 8600) is False
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: False)
    with pytest.warns(UserWarning, match="cuDNN is not available"):
        assert apex.check_cudnn_version_and_warn("--fast", 1) is False
