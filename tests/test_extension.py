"""How the compiled library is found, required and built."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

import ampctx
from ampctx._errors import ExtensionError
from ampctx.kernels import definitions, extension, ops

EMULATION = Path(__file__).parent / "cuda_emulation"
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


@pytest.fixture(params=["missing", "broken", "left out", "hidden"])
def unusable(request, tmp_path, monkeypatch):
    """The path of a library that cannot serve, why, and what helps."""
    monkeypatch.delenv("AMPCTX_REQUIRE_EXTENSION", raising=False)
    path = tmp_path / "tree" / "_ops.so"
    path.parent.mkdir()
    if request.param == "broken":
        path.write_bytes(b"not a library" * 100)
        return path, "cannot be loaded .*invalid ELF header", extension.BUILD_HINT
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
    assert result.stdout.startswith("('cpu',) [2.0, 2.0, 2.0]\nbuilt without nvcc"), result.stderr
    assert result.stdout.endswith("False\n")
    assert_told_at_the_first_cuda_tensor(result, "built without nvcc: install the CUDA toolkit")


# --- setup.py -------------------------------------------------------------------------------------------------------


def setup_py():
    spec = importlib.util.spec_from_file_location("ampctx_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compiler_without(folder, *flags):
    """A g++ 9.4 that does not know these flags."""
    compiler = folder / "old-g++"
    compiler.write_text(
        '#!/bin/sh\nif [ "$1" = --version ]; then echo "g++ (old) 9.4.0"; exit; fi\n'
        f'for word; do case "$word" in {"|".join(flags)}) exit 1;; esac; done\n'
        f'exec {os.environ.get("CXX", "g++")} "$@"\n'
    )
    compiler.chmod(0o755)
    return str(compiler)


def build(folder, *command, **environment):
    """Builds the library from a copy of the sources, or runs another command of setup.py there."""
    folder.mkdir(exist_ok=True)
    compiler_without(folder, "-ffp-contract=off")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "MANIFEST.in"):
        shutil.copy(ROOT / name, folder)
    for name in ("csrc", "docs"):
        shutil.copytree(ROOT / name, folder / name)
    (folder / "ampctx/kernels").mkdir(parents=True)
    shutil.copy(ROOT / "ampctx/kernels/spec.py", folder / "ampctx/kernels")
    for name in ("__init__.py", "_version.py"):
        shutil.copy(ROOT / "ampctx" / name, folder / "ampctx")
    command = [sys.executable, "setup.py", *(command or ("build_ext", "--inplace"))]
    variables = {**os.environ, "AMPCTX_CUDA": "0", **environment}
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)


@pytest.mark.full
def test_build_without_cuda(tmp_path):
    compiler = tmp_path / "g++"
    compiler.write_text(f'#!/bin/sh\nexec {os.environ.get("CXX", "g++")} "$@" -O1\n')  # nothing is computed here
    compiler.chmod(0o755)
    result = build(tmp_path, CXX=str(compiler))
    assert result.returncode == 0, result.stderr
    assert "warning:" not in result.stdout
    steps = re.findall(r"^\[(\d+)/(\d+)\] csrc/\S+ .* [\d.]+ s$", result.stdout, re.M)
    assert steps == [(str(i + 1), str(len(steps))) for i in range(len(steps))], "a line for each compiled file"
    library = str(tmp_path / "ampctx/_ops.so")
    code = f"import torch; from emulation_build import module_of; print(module_of({library!r}).build_info())"
    info = json.loads(started(code, EMULATION).stdout)
    assert info["cuda"] is None
    assert info["cuda_archs"] == []


def test_flags_for_speed_are_left_out_for_a_compiler_without_them(tmp_path, capsys):
    setup = setup_py()
    compiler = compiler_without(tmp_path, "-fno-thread-jumps")
    assert setup.without_unknown(compiler, setup.SIMD_FLAGS) == []
    assert "old-g++ does not know -fno-thread-jumps: building without" in capsys.readouterr().out
    assert setup.without_unknown(compiler, setup.CXX_FLAGS) == list(setup.CXX_FLAGS)
    assert setup.why_no_compiler(compiler) == ""


OLD = (
    "g++ (old) 9.4.0 found, g++ 11 or newer needed (for -ffp-contract=off): install it, or set CXX, and install ampctx "
    "again, with --force-reinstall"
)
WRONG_BUILDS = {
    "no-compiler": (
        {"CXX": "no-such-g++", "AMPCTX_KERNELS": "1"},
        "asked for, but cannot be built: no C++ compiler: 'no-such-g++' was not found. Install g++ 11 or newer",
    ),
    "old-compiler": ({"CXX": "./old-g++", "AMPCTX_KERNELS": "1"}, f"asked for, but cannot be built: {OLD}"),
    "kernels-value": ({"AMPCTX_KERNELS": "no"}, "AMPCTX_KERNELS='no': expected auto, 0 or 1"),
    "no-nvcc": (
        {"AMPCTX_CUDA": "1", "CUDA_HOME": "/nowhere"},
        "AMPCTX_CUDA=1, but nvcc was not found: tried /nowhere/bin/nvcc. Set CUDA_HOME",
    ),
    "cuda-value": ({"AMPCTX_CUDA": "yes"}, "AMPCTX_CUDA='yes': expected auto, 0 or 1"),
}


@pytest.mark.parametrize(("environment", "message"), WRONG_BUILDS.values(), ids=WRONG_BUILDS.keys())
def test_a_build_that_cannot_work_says_why(tmp_path, environment, message):
    result = build(tmp_path, **environment)
    assert result.returncode != 0
    assert message in result.stderr


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({"AMPCTX_KERNELS": "0"}, "AMPCTX_KERNELS=0"),
        (
            {"CXX": "no-such-g++"},
            "no C++ compiler: 'no-such-g++' was not found. Install g++ 11 or newer, or set CXX, "
            "and install ampctx again, with --force-reinstall",
        ),
    ],
    ids=["switched-off", "no-compiler"],
)
def test_a_build_without_kernels_is_pure_python(tmp_path, environment, why):
    """As on macOS and Windows. What such an install does: test_the_import_without_a_library."""
    result = build(tmp_path, "bdist_wheel", **environment)
    assert result.returncode == 0, result.stderr
    assert f"ampctx is built without compiled kernels and will run on plain torch: {why}" in result.stdout
    (wheel,) = (tmp_path / "dist").iterdir()
    assert wheel.name == f"ampctx-{ampctx.__version__}-py3-none-any.whl"
    files = zipfile.ZipFile(wheel)
    assert not any(name.endswith(".so") for name in files.namelist())
    assert files.read("ampctx/_why_no_ops.txt").decode() == why


def test_the_source_archive_has_what_the_build_needs(tmp_path):
    assert build(tmp_path, "sdist").returncode == 0
    (archive,) = (tmp_path / "dist").iterdir()
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    sources = {str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*") if p.is_file() and p.suffix != ".pyc"}
    assert names >= {"setup.py", "pyproject.toml", "CHANGELOG.md", "docs/index.md", "ampctx/kernels/spec.py", *sources}
    assert not any(name.startswith("tests") for name in names)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_no_cuda_kernels_for_a_torch_without_cuda(tmp_path, monkeypatch, capsys):
    setup = setup_py()
    monkeypatch.delenv("AMPCTX_CUDA", raising=False)
    for cuda in (None, "13.0"):
        folder = tmp_path / str(cuda)
        (folder / "torch").mkdir(parents=True)
        (folder / "torch/version.py").write_text(f"__version__ = '2.13.0+test'\ncuda: Optional[str] = {cuda!r}\n")
        monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
        assert (setup.Nvcc.find() is None) == (cuda is None)
    said = "torch 2.13.0+test has no CUDA: building CPU kernels only. Set AMPCTX_CUDA=1 to build CUDA kernels too.\n"
    assert capsys.readouterr().out == said
    monkeypatch.setenv("AMPCTX_CUDA", "1")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "None"), *sys.path])
    assert setup.Nvcc.find() is not None


@pytest.mark.skipif(not ops.extension.build.get("cuda"), reason="built without nvcc")
def test_an_unknown_architecture_is_an_error(tmp_path):
    result = build(tmp_path, AMPCTX_CUDA="1", AMPCTX_CUDA_ARCHS="75,30")
    assert result.returncode != 0
    assert re.search(r"AMPCTX_CUDA_ARCHS=75,30: this nvcc knows \[.*\], not \[30\]", result.stderr)
    result = build(tmp_path / "named", AMPCTX_CUDA="1", AMPCTX_CUDA_ARCHS="hopper")
    assert result.returncode != 0
    assert "AMPCTX_CUDA_ARCHS='hopper': expected compute capabilities, such as '80,90'" in result.stderr
