"""What apex.amp and apex itself have: modules and helpers."""

import sys

import pytest
import torch
from apex import amp
from processes import output

import ampctx

MODULES = ["_amp_state", "_initialize", "amp", "compat", "frontend", "handle", "rnn_compat", "scaler"]


def test_importing_says_nothing():
    """In a fresh process, where a warning is an error."""
    imports = "import apex; apex.parallel.Reducer, apex.normalization; import "
    imports += ", ".join(f"apex.amp.{module}" for module in MODULES)
    assert output("-c", f"import ampctx_apex; ampctx_apex.install_apex(); {imports}") == ""


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
