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
from ampctx.kernels import cuda_support, definitions, extension, ops

EMULATION = Path(__file__).parent / "cuda_emulation"
ROOT = Path(__file__).parents[1]
LOAD = """
import sys, torch
from pathlib import Path
from ampctx.kernels import definitions, extension
library = torch.library.Library("ampctx_again", "DEF")
for schema in definitions.SCHEMAS:
    library.define(schema)
found = extension.load("ampctx_again", definitions.define, Path(sys.argv[1]))
print(found)
"""


def load_elsewhere(path, required):
    """Loads a library in a process of its own, as a fresh import would."""
    environment = {**os.environ, "AMPCTX_REQUIRE_EXTENSION": ""}
    code = f"import os; os.environ['AMPCTX_REQUIRE_EXTENSION'] = ''\n{LOAD}"
    code = code.replace("found =", f"os.environ['AMPCTX_REQUIRE_EXTENSION'] = {required!r}\nfound =")
    return subprocess.run([sys.executable, "-c", code, str(path)], env=environment, capture_output=True, text=True)


@pytest.fixture
def broken(tmp_path):
    path = tmp_path / "_ops.so"
    path.write_bytes(b"not a library" * 100)
    return path


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


@pytest.mark.parametrize("kind", ["missing", "broken"])
def test_a_library_that_cannot_serve_warns_once_with_the_reason(tmp_path, broken, kind, monkeypatch):
    monkeypatch.delenv("AMPCTX_REQUIRE_EXTENSION", raising=False)
    path = {"missing": tmp_path / "nowhere.so", "broken": broken}[kind]
    why = {"missing": "does not exist: build it with", "broken": "cannot be loaded .*invalid ELF header"}[kind]
    with pytest.warns(RuntimeWarning, match=f"ampctx runs on plain torch, slower: .*{why}") as record:
        found = extension.load("ampctx", definitions.define, path)
    assert len(record) == 1
    assert not found.loaded
    assert found.backends == ()
    assert "pip install ." in found.reason


@pytest.mark.parametrize("required", ["1", "cpu", "cuda", "CPU"])
@pytest.mark.parametrize("kind", ["missing", "broken"])
def test_a_required_library_that_cannot_serve_is_an_error(tmp_path, broken, kind, required, monkeypatch):
    monkeypatch.setenv("AMPCTX_REQUIRE_EXTENSION", required)
    path = {"missing": tmp_path / "nowhere.so", "broken": broken}[kind]
    with pytest.raises(ExtensionError, match="build it with 'pip install .'"):
        extension.load("ampctx", definitions.define, path)


def test_an_unknown_requirement_is_an_error(monkeypatch):
    monkeypatch.setenv("AMPCTX_REQUIRE_EXTENSION", "yes")
    with pytest.raises(ExtensionError, match="AMPCTX_REQUIRE_EXTENSION='yes': expected 1, cpu, cuda or nothing"):
        extension.load("ampctx", definitions.define)


@pytest.mark.full
def test_a_required_cuda_backend_on_a_torch_without_it(monkeypatch):
    if torch.version.cuda:
        pytest.skip("this torch has CUDA")
    result = load_elsewhere(extension.LIBRARY, "cuda")
    assert result.returncode == 1
    assert "ExtensionError: AMPCTX_REQUIRE_EXTENSION=cuda, but the CUDA kernels cannot run" in result.stderr
    assert "this torch was built without CUDA" in result.stderr


@pytest.mark.parametrize(
    ("record", "told"), [("", "build it with 'pip"), ("no compiler", "left the kernels out: no compiler")]
)
def test_the_import_without_a_library(tmp_path, record, told):
    """In a process of its own: one warning, and every op still works. The reason of the build is told."""
    package = tmp_path / "ampctx"
    shutil.copytree(ROOT / "ampctx", package, ignore=shutil.ignore_patterns("_ops.so", "__pycache__"))
    if record:
        (package / "_why_no_ops.txt").write_text(record)
    code = (
        "import torch; from ampctx import ops; x = [torch.ones(3)]; ops.multi_tensor_scale(x, x, torch.zeros(()), 2.0);"
        " print(x[0].tolist(), ops.extension.loaded)"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "AMPCTX_REQUIRE_EXTENSION": ""}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert result.stdout == "[2.0, 2.0, 2.0] False\n", result.stderr
    assert result.stderr.count("RuntimeWarning: ampctx runs on plain torch, slower") == 1
    assert told in result.stderr
    environment["AMPCTX_REQUIRE_EXTENSION"] = "1"
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 1
    assert "ExtensionError" in result.stderr
    assert "_ops.so does not exist" in result.stderr


def test_sources_that_hide_the_installed_package(tmp_path):
    """As where ``pip install .`` is followed by ``python -m ampctx`` in the checkout."""
    tree, site = tmp_path / "tree", tmp_path / "site"
    shutil.copytree(ROOT / "ampctx", tree / "ampctx", ignore=shutil.ignore_patterns("_ops.so", "__pycache__"))
    shutil.copytree(ROOT / "ampctx", site / "ampctx", ignore=shutil.ignore_patterns("__pycache__"))
    (site / "ampctx-0.1.0.dist-info").mkdir()
    (site / "ampctx-0.1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: ampctx\nVersion: 0.1.0\n")
    environment = {**os.environ, "PYTHONPATH": str(site), "AMPCTX_REQUIRE_EXTENSION": ""}
    command = [sys.executable, "-m", "ampctx", "info", "--json"]
    in_tree, outside = (
        json.loads(subprocess.run(command, env=environment, cwd=folder, capture_output=True, check=True).stdout)
        for folder in (tree, tmp_path)
    )
    reason = in_tree["extension"]["reason"]
    assert f"Python imported this source tree, not the ampctx installed in {site / 'ampctx'}. Start" in reason
    assert extension.BUILD_HINT not in reason
    assert outside["extension"]["loaded"]


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


def import_with_driver(folder, version, required=""):
    """Imports ampctx where libcuda.so.1 is that of a driver for this CUDA."""
    (folder / "driver.cpp").write_text(DRIVER)
    flags = ["-shared", "-fPIC", f"-DVERSION={version}", "-o", str(folder / "libcuda.so.1")]
    subprocess.run([os.environ.get("CXX", "g++"), str(folder / "driver.cpp"), *flags], check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder), "AMPCTX_REQUIRE_EXTENSION": required}
    return subprocess.run([sys.executable, "-c", WITH_CUDA], env=environment, capture_output=True, text=True)


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
    result = import_with_driver(tmp_path, 1000 * (major - 1) + 80)
    assert result.returncode == 0, result.stderr
    reason = f"the CUDA kernels were built with CUDA {toolkit}, which needs driver"
    lines = result.stdout.splitlines()
    assert lines[0] == "('cpu',) [2.0, 2.0, 2.0]"
    assert lines[1].startswith(reason)
    assert lines[1].endswith(f"rebuild with CUDA {major - 1}")
    assert f"driver     serves CUDA {major - 1}.8" in lines
    assert f" not in use: {lines[1]}" in re.sub(r"\s+", " ", result.stdout), "over several lines of 80 columns"
    assert result.stderr.count("RuntimeWarning") == 1
    assert f"RuntimeWarning: ampctx runs on plain torch on CUDA, slower: {reason}" in result.stderr


@pytest.mark.full
def test_a_driver_that_is_too_old_for_required_kernels_is_an_error(tmp_path, toolkit):
    result = import_with_driver(tmp_path, 11080, "cuda")
    assert result.returncode == 1
    reason = f"the CUDA kernels were built with CUDA {toolkit}, which needs"
    required = "ExtensionError: AMPCTX_REQUIRE_EXTENSION=cuda, but the CUDA kernels cannot run"
    assert f"{required}: {reason}" in result.stderr
    assert import_with_driver(tmp_path, 11080, "cpu").stderr == ""


@pytest.mark.full
def test_a_driver_that_serves_is_not_initialized_by_the_import(tmp_path, toolkit):
    major, minor = toolkit.split(".")
    result = import_with_driver(tmp_path, 1000 * int(major) + 10 * int(minor), "cuda")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("('cpu', 'cuda') [2.0, 2.0, 2.0]\n\n")
    assert result.stderr == ""


@pytest.mark.full
def test_a_machine_without_a_driver_says_nothing(toolkit):
    if cuda_support.driver_version():
        pytest.skip("this machine has a driver")
    environment = {**os.environ, "AMPCTX_REQUIRE_EXTENSION": ""}
    result = subprocess.run([sys.executable, "-c", WITH_CUDA], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("('cpu', 'cuda') [2.0, 2.0, 2.0]\n\n")
    assert "driver     no NVIDIA driver" in result.stdout
    assert result.stderr == ""


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
    code = "import sys, torch; from emulation_build import module_of; print(module_of(sys.argv[1]).build_info())"
    command = [sys.executable, "-c", code, str(tmp_path / "ampctx/_ops.so")]
    info = json.loads(subprocess.run(command, cwd=EMULATION, capture_output=True, text=True, check=True).stdout)
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
        ({"CXX": "./old-g++"}, OLD),
    ],
    ids=["switched-off", "no-compiler", "old-compiler"],
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


def torch_in(folder, cuda):
    (folder / "torch").mkdir(parents=True)
    (folder / "torch/version.py").write_text(f"__version__ = '2.13.0+test'\ncuda: Optional[str] = {cuda!r}\n")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_no_cuda_kernels_for_a_torch_without_cuda(tmp_path, monkeypatch, capsys):
    setup = setup_py()
    monkeypatch.delenv("AMPCTX_CUDA", raising=False)
    for cuda in (None, "13.0"):
        torch_in(tmp_path / str(cuda), cuda)
        monkeypatch.setattr(sys, "path", [str(tmp_path / str(cuda)), *sys.path])
        assert (setup.Nvcc.find() is None) == (cuda is None)
    said = "torch 2.13.0+test has no CUDA: building CPU kernels only. Set AMPCTX_CUDA=1 to build CUDA kernels too.\n"
    assert capsys.readouterr().out == said
    monkeypatch.setenv("AMPCTX_CUDA", "1")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "None"), *sys.path])
    assert setup.Nvcc.find() is not None


def test_a_missing_nvcc_is_an_error_when_asked_for(tmp_path):
    result = build(tmp_path, AMPCTX_CUDA="1", CUDA_HOME="/nowhere")
    assert result.returncode != 0
    assert "AMPCTX_CUDA=1, but nvcc was not found: tried /nowhere/bin/nvcc. Set CUDA_HOME" in result.stderr


@pytest.mark.skipif(not ops.extension.build.get("cuda"), reason="built without nvcc")
def test_an_unknown_architecture_is_an_error(tmp_path):
    result = build(tmp_path, AMPCTX_CUDA="1", AMPCTX_CUDA_ARCHS="75,30")
    assert result.returncode != 0
    assert re.search(r"AMPCTX_CUDA_ARCHS=75,30: this nvcc knows \[.*\], not \[30\]", result.stderr)
    result = build(tmp_path / "named", AMPCTX_CUDA="1", AMPCTX_CUDA_ARCHS="hopper")
    assert result.returncode != 0
    assert "AMPCTX_CUDA_ARCHS='hopper': expected compute capabilities, such as '80,90'" in result.stderr
