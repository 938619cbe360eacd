"""Programs that ask for the version of apex before they import it."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ampctx
from ampctx.compat import install


def test_apex_has_a_version():
    assert importlib.metadata.version("apex") == "0.1"
    assert importlib.metadata.metadata("apex")["Name"] == "apex"


def test_apex_is_among_all_distributions():
    names = [distribution.metadata["Name"] for distribution in importlib.metadata.distributions()]
    assert names.count("apex") == 1
    assert "torch" in names


@pytest.mark.parametrize("module", ["apex", "amp_C", "apex_C", "fused_weight_gradient_mlp_cuda", "xentropy_cuda"])
def test_its_modules_lead_to_it(module):
    assert importlib.metadata.packages_distributions()[module] == ["apex"]


def test_the_roots_are_the_files_of_the_modules():
    assert set(install.ROOTS) == {"apex", *(path.stem for path in install.MODULES.glob("*.py"))}
    assert all((install.MODULES / f"{name}.py").exists() for name in install.ROOTS if name != "apex")


def test_other_distributions_are_found_as_before():
    assert importlib.metadata.version("torch").startswith("2.")
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("no-such-package-of-anybody")


def test_the_version_goes_with_the_finder(monkeypatch):
    finders = [finder for finder in sys.meta_path if not isinstance(finder, install._ServedFinder)]
    monkeypatch.setattr(sys, "meta_path", finders)
    with pytest.raises(importlib.metadata.PackageNotFoundError, match="apex"):
        importlib.metadata.version("apex")


def test_a_child_process_asks_for_the_version_first():
    """Under the startup directory of ``ampctx path``, before anything there has imported ampctx."""
    root = Path(ampctx.__file__).parent
    paths = [str(root / "compat" / "startup"), str(root.parent)]
    program = "import importlib.metadata as m; print(m.version('apex')); from apex import amp; print(m.version('apex'))"
    environment = {**os.environ, "AMPCTX_APEX": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-W", "error", "-c", program]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stdout, run.stderr) == (0, "0.1\n0.1\n", "")
