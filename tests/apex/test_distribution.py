"""Programs that ask for the version of apex before they import it."""

import importlib.metadata
import sys
from pathlib import Path

import pytest
from ampctx_apex import install


def test_apex_has_a_version_and_is_among_all_distributions():
    assert importlib.metadata.version("apex") == "0.1"
    assert importlib.metadata.metadata("apex")["Name"] == "apex"
    names = [distribution.metadata["Name"] for distribution in importlib.metadata.distributions()]
    assert names.count("apex") == 1
    assert "torch" in names


@pytest.mark.parametrize("module", ["apex", "amp_C", "apex_C", "fused_weight_gradient_mlp_cuda", "xentropy_cuda"])
def test_its_modules_lead_to_it(module):
    assert importlib.metadata.packages_distributions()[module] == ["apex"]


def test_the_roots_are_the_files_of_the_modules():
    modules = Path(install.MODULES)
    assert set(install.ROOTS) == {"apex", *(path.stem for path in modules.glob("*.py"))}
    assert not any(name in sys.stdlib_module_names for name in install.ROOTS)


def test_other_distributions_are_found_as_before():
    assert importlib.metadata.version("torch").startswith("2.")
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("no-such-package-of-anybody")


def test_the_version_goes_with_the_finder(monkeypatch):
    finders = [f for f in sys.meta_path if not str(getattr(f, "__module__", "")).startswith("ampctx_apex.")]
    monkeypatch.setattr(sys, "meta_path", finders)
    with pytest.raises(importlib.metadata.PackageNotFoundError, match="apex"):
        importlib.metadata.version("apex")
