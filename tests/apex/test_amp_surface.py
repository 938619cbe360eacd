"""The names of apex.amp: which there are, what they are bound to, and what refused ones say."""

import importlib
import subprocess
import sys

import pytest
import torch
from amp_models import OPTIMIZERS, Probe
from ampctx_apex.names import AMP
from apex import amp

import ampctx

MODULES = [
    "_amp_state",
    "_initialize",
    "_process_optimizer",
    "amp",
    "compat",
    "frontend",
    "handle",
    "lists",
    "lists.functional_overrides",
    "lists.torch_overrides",
    "lists.tensor_overrides",
    "opt",
    "rnn_compat",
    "scaler",
    "utils",
    "wrap",
]


def test_importing_says_nothing():
    """In a fresh process, where a warning is an error."""
    code = "import " + ", ".join(f"apex.amp.{module}" for module in MODULES)
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


PUBLIC = [
    "initialize",
    "scale_loss",
    "master_params",
    "state_dict",
    "load_state_dict",
    "disable_casts",
    "half_function",
    "bfloat16_function",
    "float_function",
    "promote_function",
    "register_half_function",
    "register_bfloat16_function",
    "register_float_function",
    "register_promote_function",
]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_functions_are_plain_aliases(name):
    assert getattr(amp, name) == getattr(ampctx.amp, name)
    assert getattr(amp, name) is getattr(ampctx.amp, name)


def test_sub_modules_are_attributes():
    for name in ["amp", "compat", "frontend", "handle", "lists", "opt", "rnn_compat", "scaler", "utils", "wrap"]:
        assert getattr(amp, name) is sys.modules[f"apex.amp.{name}"]


def test_the_state_shadows_its_module():
    import apex.amp._amp_state as imported
    from apex.amp import _amp_state as of_package
    from apex.amp._amp_state import AmpState, _amp_state, master_params, maybe_print, warn_or_err

    assert isinstance(_amp_state, AmpState)
    assert amp._amp_state is of_package is _amp_state is imported is imported._amp_state
    assert sys.modules["apex.amp._amp_state"]._amp_state is _amp_state
    assert callable(maybe_print)
    assert callable(warn_or_err)
    assert master_params is ampctx.amp.master_params


def _resolve(name):
    """The object that a row of the table stands for, by importing the longest module and getting the rest."""
    parts = name.split(".")
    for i in range(len(parts), 0, -1):
        module = ".".join(parts[:i])
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if not module.startswith(str(error.name)) and not str(error).endswith("is not a package"):
                raise
            continue
        for attribute in parts[i:]:
            found = getattr(found, attribute)
        return found
    raise AssertionError(name)


# Instance attributes: there once amp is initialized.
_OF_INSTANCES = (
    "apex.amp._process_optimizer.AmpOptimizerState.",
    "apex.amp._amp_state.",
    "apex.amp.scaler.LossScaler.",
)


@pytest.mark.parametrize("name", [n for n, entry in AMP.items() if not n.startswith(_OF_INSTANCES)])
def test_every_row_of_the_table_exists(name):
    if name.startswith("apex.amp.handle.AmpHandle."):
        assert hasattr(amp.handle.AmpHandle(), name.rpartition(".")[2])
    else:
        _resolve(name)


def test_every_row_of_the_state_exists():
    amp.initialize(torch.nn.Linear(2, 2), opt_level="O1", verbosity=0)
    for name in AMP:
        if name.startswith("apex.amp._amp_state."):
            short = name.rpartition(".")[2]
            assert hasattr(sys.modules["apex.amp._amp_state"], short) or hasattr(amp._amp_state, short), name
        if name.startswith("apex.amp.scaler.LossScaler."):
            assert hasattr(amp._amp_state.loss_scalers[0], name.rpartition(".")[2]), name


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_every_row_of_the_stash_exists(level):
    model = Probe()
    _, optimizer = amp.initialize(model, OPTIMIZERS["SGD"](model.parameters()), opt_level=level, verbosity=0)
    prefix = "apex.amp._process_optimizer.AmpOptimizerState."
    masters = {"fp16_groups", "all_fp32_from_fp32_grad_stash"} | {
        n.removeprefix(prefix) for n in AMP if n.startswith(prefix) and "_from_" in n
    }
    for name in (n.removeprefix(prefix) for n in AMP if n.startswith(prefix)):
        expected = name not in ("all_fp32_params", "all_fp32_grad_stash") if level == "O2" else name not in masters
        assert hasattr(optimizer._amp_stash, name) is expected, name
        assert (name in dir(optimizer._amp_stash)) is expected, name


@pytest.mark.parametrize("name", [n for n, entry in AMP.items() if entry.status == "refused" and "AmpHandle" not in n])
def test_refused_names_say_so_when_called(name):
    helper = _resolve(name)
    with pytest.raises(NotImplementedError, match=f"{name} is not supported by ampctx. .*[a-z]"):
        helper(None)


# --- initialize -------------------------------------------------------------------------------------------------------


def _given(shape):
    model = Probe()
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    return {
        "model": (model, None),
        "list": ([model], None),
        "model, optimizer": (model, optimizer),
        "model, list": (model, [optimizer]),
        "model, empty list": (model, []),
        "list, optimizer": ([model], optimizer),
        "list, list": ([model], [optimizer]),
    }[shape]


@pytest.mark.parametrize("enabled", [True, False], ids=["enabled", "disabled"])
@pytest.mark.parametrize(
    "shape", ["model", "list", "model, optimizer", "model, list", "model, empty list", "list, optimizer", "list, list"]
)
def test_what_is_returned_has_the_shape_of_what_was_given(shape, enabled):
    models, optimizers = _given(shape)
    result = amp.initialize(models, optimizers, enabled=enabled, opt_level="O2", verbosity=0)
    if optimizers is None:
        assert result is models
    else:
        assert result[0] is models
        assert result[1] is optimizers
        assert isinstance(result, tuple)


_DEFAULTS = {
    "O0": ["torch.float32", "False", "None", "False", "1.0"],
    "O1": ["None", "True", "None", "None", "dynamic"],
    "O2": ["torch.float16", "False", "True", "True", "dynamic"],
    "O3": ["torch.float16", "False", "False", "False", "1.0"],
    "O5": ["torch.bfloat16", "False", "True", "True", "1.0"],
}


@pytest.mark.parametrize("level", _DEFAULTS)
def test_the_banner(level, capsys):
    amp.initialize(torch.nn.Linear(2, 2), opt_level=level, loss_scale=128.0)
    names = ["cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32", "master_weights", "loss_scale"]

    def options(values):
        pairs = [("enabled", "True"), ("opt_level", level), *zip(names, values, strict=True)]
        return [f"{name:22} : {value}" for name, value in pairs]

    brief = amp.frontend.opt_levels[level].brief
    assert capsys.readouterr().out.split("\n") == [
        *f"Selected optimization level {brief}".split("\n"),
        "Defaults for this optimization level are:",
        *options(_DEFAULTS[level]),
        "Processing user overrides (additional kwargs that are not None)...",
        "After processing overrides, optimization options are:",
        *options([*_DEFAULTS[level][:-1], "128.0"]),
        "",
    ]


# --- helpers of apex itself -------------------------------------------------------------------------------------------


def test_deprecated_warning():
    import apex

    assert issubclass(apex.DeprecatedFeatureWarning, FutureWarning)
    with pytest.warns(apex.DeprecatedFeatureWarning, match="^old$"):
        apex.deprecated_warning("old")


def test_check_cudnn_version_and_warn(monkeypatch):
    import apex

    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 8500)
    assert apex.check_cudnn_version_and_warn("--fast", 8500) is True
    with pytest.warns(UserWarning, match="`--fast` needs cuDNN 8600 or later, and this is 8500"):
        assert apex.check_cudnn_version_and_warn("--fast", 8600) is False
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: False)
    with pytest.warns(UserWarning, match="cuDNN is not available"):
        assert apex.check_cudnn_version_and_warn("--fast", 1) is False


def test_rank_info_formatter():
    import logging

    import apex

    record = logging.LogRecord("apex", logging.INFO, "file.py", 1, "hello", None, None)
    assert apex.RankInfoFormatter("rank:%(rank_info)s %(message)s").format(record) == "rank:0 hello"
    assert logging.getLogger("apex").handlers == []
    assert logging.getLogger("apex").propagate is True
