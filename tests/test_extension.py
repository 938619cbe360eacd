"""How the compiled library is found, required and built."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from ampctx._errors import ExtensionError
from ampctx.kernels import definitions, extension, ops

ROOT = Path(__file__).parents[1]


def started(code, folder=None, **environment):
    """Python runs the code, as a rule with nothing required of the library."""
    given = {**os.environ, "AMPCTX_REQUIRE_EXTENSION": "", **environment}
    return subprocess.run([sys.executable, "-c", code], env=given, cwd=folder, capture_output=True, text=True)


def test_the_library_serves_the_cpu():
    assert ops.extension.loaded
    assert ops.extension.backends[0] == "cpu"
    build = ops.extension.build
    assert build["simd_used"] in build["simd"]
    assert build["simd"][0] == "baseline"
    assert build["compiler"]
    assert bool(build["cuda"]) == bool(build["cuda_archs"])
    if not torch.version.cuda:
        assert ops.extension.reason == "this torch was built without CUDA"


@pytest.fixture(params=["missing", "broken", "left out", "hidden", "free-threaded"])
def unusable(request, tmp_path, monkeypatch):
    """The path of a library that cannot serve, why, and what helps."""
    monkeypatch.delenv("AMPCTX_REQUIRE_EXTENSION", raising=False)
    path = tmp_path / "tree" / "_ops.so"
    path.parent.mkdir()
    if request.param == "broken":
        path.write_bytes(b"not a library" * 100)
        return path, "cannot be loaded .*invalid ELF header", extension.BUILD_HINT
    if request.param == "free-threaded":
        path.touch()
        monkeypatch.setitem(sysconfig.get_config_vars(), "Py_GIL_DISABLED", 1)
        return path, "a free-threaded Python lacks the stable ABI", "that the kernels need: use one with the GIL"
    why, helps = "does not exist", extension.BUILD_HINT
    if request.param == "left out":
        (path.parent / "_why_no_ops.txt").write_text("no compiler")
        helps = "the build left the kernels out: no compiler"
    elif request.param == "hidden":  # as where `pip install .` is followed by `python -m ampctx` in the checkout
        installed = tmp_path / "site" / "ampctx"
        installed.mkdir(parents=True)
        (installed / path.name).touch()
        (tmp_path / "site" / "ampctx-0.1.0.dist-info").mkdir()
        (tmp_path / "site" / "ampctx-0.1.0.dist-info" / "METADATA").write_text("Name: ampctx\nVersion: 0.1.0\n")
        monkeypatch.syspath_prepend(tmp_path / "site")
        monkeypatch.setattr(extension, "LIBRARY", path)
        helps = f"Python imported this source tree, not the ampctx installed in {installed}. Start"
    return path, why, helps


def test_a_library_that_cannot_serve_warns_once_with_the_reason(unusable, monkeypatch):
    path, why, helps = unusable
    with pytest.warns(
        RuntimeWarning, match=f"ampctx runs on plain torch, slower: .*{why}.*{re.escape(helps)}"
    ) as record:
        found = extension.load("ampctx", definitions.define, path)
    assert len(record) == 1
    assert not found.loaded
    assert found.backends == ()
    assert (extension.BUILD_HINT in found.reason) == (helps == extension.BUILD_HINT)
    for required in ("1", "cpu", "cuda", "CPU"):
        monkeypatch.setenv("AMPCTX_REQUIRE_EXTENSION", required)
        with pytest.raises(ExtensionError, match=re.escape(helps)):
            extension.load("ampctx", definitions.define, path)


def test_an_unknown_requirement_is_an_error(monkeypatch):
    monkeypatch.setenv("AMPCTX_REQUIRE_EXTENSION", "yes")
    with pytest.raises(ExtensionError, match="AMPCTX_REQUIRE_EXTENSION='yes': expected 1, cpu, cuda or nothing"):
        extension.load("ampctx", definitions.define)


def test_the_import_without_a_library(tmp_path):
    """In a process of its own: one warning, and every op still works."""
    shutil.copytree(ROOT / "ampctx", tmp_path / "ampctx", ignore=shutil.ignore_patterns("_ops.so", "__pycache__"))
    code = """
import torch; from ampctx import ops; x = [torch.ones(3)]; ops.multi_tensor_scale(x, x, torch.zeros(()), 2.0)
print(x[0].tolist(), ops.extension.loaded)
"""
    result = started(code, tmp_path, PYTHONPATH=str(tmp_path))
    assert result.stdout == "[2.0, 2.0, 2.0] False\n", result.stderr
    assert result.stderr.count("RuntimeWarning: ampctx runs on plain torch, slower") == 1
    result = started(code, tmp_path, PYTHONPATH=str(tmp_path), AMPCTX_REQUIRE_EXTENSION="1")
    assert result.returncode == 1
    assert "ExtensionError" in result.stderr
    assert "_ops.so does not exist" in result.stderr


# --- the driver ------------------------------------------------------------------------------------------------------

DRIVER = """
#include <cstdlib>
extern "C" int cuDriverGetVersion(int* version) { return *version = VERSION, 0; }
extern "C" int cuInit(unsigned) { std::abort(); }  // an import must not
"""
WITH_CUDA = """
import sys, torch
torch.version.cuda = "12.8"  # as a torch for CUDA has it
import ampctx
found = ampctx.ops.extension
x = [torch.ones(3)]
ampctx.ops.multi_tensor_scale(x, x, torch.zeros(()), 2.0)
print(found.backends, x[0].tolist())
print(found.reason)
sys.argv[1:] = []
from ampctx.__main__ import main
main([])
"""
# Last, what the first CUDA tensor asks.
THEN_A_TENSOR = """
print("nothing so far", file=sys.stderr)
print(found.serves("cuda") or found.serves("cuda"))
"""


def import_with_driver(folder, version, required="", code=WITH_CUDA):
    """Imports ampctx where libcuda.so.1 is that of a driver for this CUDA."""
    (folder / "driver.cpp").write_text(DRIVER)
    flags = ["-shared", "-fPIC", f"-DVERSION={version}", "-o", str(folder / "libcuda.so.1")]
    subprocess.run([os.environ.get("CXX", "g++"), str(folder / "driver.cpp"), *flags], check=True)
    return started(code, LD_LIBRARY_PATH=str(folder), AMPCTX_REQUIRE_EXTENSION=required)


@pytest.fixture
def toolkit():
    if torch.version.cuda:
        pytest.skip("this torch looks for the real driver")
    version = ops.extension.build["cuda"]
    if not version:
        pytest.skip("built without nvcc")
    return version


def test_a_driver_that_is_too_old_leaves_cuda_to_plain_torch(tmp_path, toolkit):
    major = int(toolkit.partition(".")[0])
    result = import_with_driver(tmp_path, 1000 * (major - 1) + 80, code=WITH_CUDA + THEN_A_TENSOR)
    assert result.returncode == 0, result.stderr
    reason = f"the CUDA kernels were built with CUDA {toolkit}, which needs driver"
    lines = result.stdout.splitlines()
    assert lines[0] == "('cpu',) [2.0, 2.0, 2.0]"
    assert lines[1].startswith(reason)
    assert lines[1].endswith(f"rebuild with CUDA {major - 1}")
    assert f"driver     serves CUDA {major - 1}.8" in lines
    assert f" not in use: {lines[1]}" in re.sub(r"\s+", " ", result.stdout), "over several lines of 80 columns"
    assert_told_at_the_first_cuda_tensor(result, reason)


def assert_told_at_the_first_cuda_tensor(result, reason):
    assert result.stderr.startswith("nothing so far\n")
    assert result.stderr.count("RuntimeWarning") == 1
    assert f"RuntimeWarning: ampctx runs on plain torch on CUDA, slower: {reason}" in result.stderr


@pytest.mark.skipif(bool(ops.extension.build.get("cuda")), reason="built with nvcc")
def test_a_torch_for_cuda_and_a_build_without_it_say_nothing_before_the_first_cuda_tensor():
    """Login nodes, CI and data workers have no GPU."""
    result = started(WITH_CUDA + THEN_A_TENSOR)
    why = f"the build left the CUDA kernels out: {ops.extension.build['why_no_cuda']}"
    assert result.stdout.startswith(f"('cpu',) [2.0, 2.0, 2.0]\n{why}\n"), result.stderr
    assert result.stdout.endswith("False\n")
    assert_told_at_the_first_cuda_tensor(result, why)
