"""What setup.py builds, what it builds again, what it asks pip for, and why it leaves kernels out."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from emulation_build import setup_module
from test_extension import ROOT, import_with_driver, started

import ampctx
from ampctx.kernels import cuda_support

CXX = os.environ.get("CXX", "g++")
VERSION = ampctx.__version__


def program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o755)
    return str(path)


def compiler_without(folder, *flags):
    """A g++ 9.4 that does not know these flags."""
    text = 'if [ "$1" = --version ]; then echo "g++ (old) 9.4.0"; exit; fi\n'
    text += f'for word; do case "$word" in {"|".join(flags)}) exit 1;; esac; done\n'
    return program(folder / "old-g++", f'{text}exec {CXX} "$@"\n')


def hasty_compiler(folder):
    """Makes an empty library of anything, and notes the sources in `log`."""
    text = 'case "$*" in *-fsyntax-only*) exit;; esac\n'
    text += f'for word; do case "$word" in *.cpp) echo "$word" >> {folder}/log;; esac; done\n'
    text += f'while [ "$1" != -o ]; do shift; done; exec {CXX} -shared -x c /dev/null -o "$2"\n'
    return program(folder / "hasty-g++", text)


REFUSAL = "#error -- unsupported GNU version! gcc versions later than 12 are not supported!"


def toolkit(folder, release="13.0", refuses=False):
    """The CUDA_HOME of an nvcc that compiles nothing, or refuses to."""
    text = f"""case "$1" in
--version) echo "Cuda compilation tools, release {release}, V{release}.76";;
--list-gpu-arch) printf "compute_75\\ncompute_80\\ncompute_86\\n";;
*) echo "In file included from <command-line>:" >&2; echo "host_config.h:132: {REFUSAL}" >&2; exit {int(refuses)};;
esac
"""
    program(folder / "bin" / "nvcc", text)
    return str(folder)


def torch_for(folder, cuda):
    """What setup.py reads of an installed torch: a folder for sys.path."""
    (folder / "torch").mkdir(parents=True)
    (folder / "torch/version.py").write_text(f"__version__ = '2.13.0+test'\ncuda: Optional[str] = {cuda!r}\n")
    return str(folder)


def build(folder, *command, **environment):
    """Builds the library from a copy of the sources, or runs another command of setup.py there."""
    compiler_without(folder, "-ffp-contract=off")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "MANIFEST.in"):
        shutil.copy(ROOT / name, folder)
    for name in ("csrc", "docs"):
        shutil.copytree(ROOT / name, folder / name, dirs_exist_ok=True)
    (folder / "ampctx/kernels").mkdir(parents=True, exist_ok=True)
    for name in ("__init__.py", "_version.py", "kernels/spec.py", "kernels/cuda_support.py"):
        shutil.copy(ROOT / "ampctx" / name, folder / "ampctx" / name)
    command = [sys.executable, "setup.py", *(command or ("build_ext", "--inplace"))]
    variables = {**os.environ, "AMPCTX_CUDA": "0", **environment}
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)


@pytest.fixture
def compile_all(tmp_path, monkeypatch):
    """Compiles a small csrc with a compiler that notes the sources; returns those that it was given."""
    compiler, log = hasty_compiler(tmp_path), tmp_path / "log"
    for name in ("library.cpp", "shared.h", "cpu/one.cpp", "cpu/two.cpp"):
        path = tmp_path / "csrc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"// {name}\n")
    monkeypatch.chdir(tmp_path)
    setup = setup_module()

    def run():
        log.write_text("")
        setup.compile_all(compiler, None, tmp_path / "build")
        return sorted(Path(line).name for line in log.read_text().splitlines())

    return run


def test_what_has_changed_is_compiled_again(compile_all):
    """Changed in content, whatever the times of files say."""
    assert compile_all() == ["library.cpp", "one.cpp", "two.cpp"]
    os.utime("csrc/cpu/one.cpp")
    assert compile_all() == []
    Path("csrc/cpu/one.cpp").write_text("// another, with an old time\n")
    os.utime("csrc/cpu/one.cpp", (0, 0))
    assert compile_all() == ["library.cpp", "one.cpp"], "library.cpp says which sources it was built from"
    Path("csrc/shared.h").write_text("// another header, which may be in any object\n")
    assert compile_all() == ["library.cpp", "one.cpp", "two.cpp"]
    Path("build/cpu_one.o").unlink()
    assert compile_all() == ["one.cpp"]


@pytest.mark.full
def test_the_build_warns_of_nothing(tmp_path):
    result = build(tmp_path, CXX=program(tmp_path / "g++", f'exec {CXX} "$@" -O1\n'))
    assert result.returncode == 0, result.stderr
    assert "warning:" not in result.stdout
    told = b'"cuda": null, "cuda_archs": [], "why_no_cuda": "AMPCTX_CUDA=0"'
    assert told in (tmp_path / "ampctx/_ops.so").read_bytes()


def test_flags_for_speed_are_left_out_for_a_compiler_without_them(tmp_path, capsys):
    setup = setup_module()
    compiler = compiler_without(tmp_path, "-fno-thread-jumps")
    assert setup.without_unknown(compiler, setup.SIMD_FLAGS) == []
    assert "old-g++ does not know -fno-thread-jumps: building without" in capsys.readouterr().out
    assert setup.without_unknown(compiler, setup.CXX_FLAGS) == list(setup.CXX_FLAGS)
    assert setup.why_no_compiler(compiler) == ""


OLD = (
    "g++ (old) 9.4.0 found, g++ 11 or newer needed (for -ffp-contract=off): install it, or set CXX, and install ampctx "
    "again, with --force-reinstall"
)
NVCC = {"AMPCTX_CUDA": "1", "CUDA_HOME": "./cuda"}
WRONG_BUILDS = {
    "no-compiler": (
        {"CXX": "no-such-g++", "AMPCTX_KERNELS": "1"},
        "asked for, but cannot be built: no C++ compiler: 'no-such-g++' was not found. Install g++ 11 or newer",
    ),
    "old-compiler": ({"CXX": "./old-g++", "AMPCTX_KERNELS": "1"}, f"asked for, but cannot be built: {OLD}"),
    "kernels-value": ({"AMPCTX_KERNELS": "no"}, "AMPCTX_KERNELS='no': expected auto, 0 or 1"),
    "no-nvcc": (
        {"AMPCTX_CUDA": "1", "CUDA_HOME": "/nowhere"},
        "AMPCTX_CUDA=1, but /nowhere/bin/nvcc was not found: set CUDA_HOME, or unset it",
    ),
    "old-nvcc": (
        {"AMPCTX_CUDA": "1", "CUDA_HOME": "./old-cuda"},
        f"AMPCTX_CUDA=1, but ./old-cuda/bin/nvcc does not compile with {CXX}: host_config.h:132: {REFUSAL}. Set CXX to",
    ),
    "cuda-value": ({"AMPCTX_CUDA": "yes"}, "AMPCTX_CUDA='yes': expected auto, 0 or 1"),
    "arch": ({**NVCC, "AMPCTX_CUDA_ARCHS": "75,30"}, "AMPCTX_CUDA_ARCHS=75,30: this nvcc knows [75, 80, 86], not [30]"),
    "archs": ({**NVCC, "AMPCTX_CUDA_ARCHS": "hopper"}, "'hopper': expected compute capabilities, such as '80,90'"),
}


@pytest.mark.parametrize(("environment", "message"), WRONG_BUILDS.values(), ids=WRONG_BUILDS.keys())
def test_a_build_that_cannot_work_says_why(tmp_path, environment, message):
    toolkit(tmp_path / "cuda"), toolkit(tmp_path / "old-cuda", refuses=True)
    result = build(tmp_path, **environment)
    assert result.returncode != 0
    assert message in result.stderr.splitlines()[-1]


def test_a_build_without_kernels_is_pure_python(tmp_path):
    """As on macOS and Windows. What such an install does: test_the_import_without_a_library."""
    result = build(tmp_path, "bdist_wheel", CXX="no-such-g++")
    assert result.returncode == 0, result.stderr
    why = "no C++ compiler: 'no-such-g++' was not found. Install g++ 11 or newer, or set CXX, and install ampctx again"
    assert f"ampctx is built without compiled kernels and will run on plain torch: {why}" in result.stdout
    (wheel,) = (tmp_path / "dist").iterdir()
    assert wheel.name == f"ampctx-{VERSION}-py3-none-any.whl"
    files = zipfile.ZipFile(wheel)
    assert not any(name.endswith(".so") for name in files.namelist())
    assert files.read("ampctx/_why_no_ops.txt").decode() == f"{why}, with --force-reinstall"


def test_the_source_archive_has_what_the_build_needs(tmp_path):
    assert build(tmp_path, "sdist").returncode == 0
    (archive,) = (tmp_path / "dist").iterdir()
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    sources = {str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*") if p.is_file() and p.suffix != ".pyc"}
    assert names >= {"setup.py", "pyproject.toml", "CHANGELOG.md", "docs/index.md", "ampctx/kernels/spec.py", *sources}
    assert not any(name.startswith("tests") for name in names)


def test_an_nvcc_that_refuses_the_compiler_leaves_the_cpu_kernels(tmp_path):
    torch = torch_for(tmp_path / "site", "12.0")
    given = {"AMPCTX_CUDA": "auto", "CUDA_HOME": toolkit(tmp_path / "cuda", refuses=True), "PYTHONPATH": torch}
    result = build(tmp_path, "bdist_wheel", CXX=hasty_compiler(tmp_path), **given)
    assert result.returncode == 0, result.stderr
    assert re.search(rf"^building CPU kernels only: \S+/nvcc does not compile with .*: {REFUSAL}", result.stdout, re.M)
    steps = re.findall(r"^\[(\d+)/(\d+)\] csrc/\S+ .* [\d.]+ s$", result.stdout, re.M)
    assert steps == [(str(i + 1), str(len(steps))) for i in range(len(steps))], "a line for each compiled file"
    (wheel,) = (tmp_path / "dist").iterdir()
    assert wheel.name.startswith(f"ampctx-{VERSION}-cp310-abi3-linux_"), "free-threaded Pythons do not take it"


@pytest.mark.parametrize("release", ["12.9", "13.0"])
def test_code_of_cuda_12_is_not_compressed(tmp_path, release):
    """Drivers before 550 could not load it."""
    nvcc = setup_module().Nvcc(toolkit(tmp_path, release) + "/bin/nvcc")
    found = nvcc.targets, "--compress-mode=size" in nvcc.flags()
    assert found == (["sm_75", "sm_80", "compute_75"], release == "13.0"), "the first of each generation, and PTX"
    assert re.fullmatch(rf"nvcc {release}.76 \(/.*/nvcc\)", nvcc.name)


# Where this machine's nvcc is out of sight.
ASKS = """
import os, sys
sys.path[:0] = {paths!r}
import setup
setup.shutil.which = lambda name, which=setup.shutil.which: None if "nvcc" in name else which(name)
os.environ |= dict(AMPCTX_CUDA={wanted!r}, CUDA_HOME="", CUDA_PATH="")
asks = setup.with_nvcc(["wheel"])
print(asks == ["wheel", *setup.NVCC_OF_PIP])
try:
    setup.Nvcc.find("g++")
except setup.NoCudaError as error:
    print(error)
"""
BRINGS = "nvcc was not found. Set CUDA_HOME, or let pip build in isolation, which brings one"
OLD_DRIVER = "while this one supports CUDA 12.4. Update the driver, or install the toolkit of CUDA 12"


@pytest.mark.parametrize(
    ("wanted", "driver", "cuda", "asks", "why"),
    [
        ("auto", 13000, "13.0", True, BRINGS),
        ("auto", 13000, None, False, "torch 2.13.0+test has no CUDA. Set AMPCTX_CUDA=1 to build CUDA kernels too"),
        ("auto", 12040, "12.4", False, OLD_DRIVER),
        ("auto", None, "13.0", False, "neither nvcc nor a driver was found. Install the driver, or set AMPCTX_CUDA=1"),
        ("1", None, None, True, BRINGS),
        ("0", 13000, "13.0", False, "AMPCTX_CUDA=0"),
    ],
)
def test_a_gpu_without_nvcc_gets_that_of_pip(tmp_path, wanted, driver, cuda, asks, why):
    code = ASKS.format(paths=[str(ROOT), torch_for(tmp_path / "site", cuda)], wanted=wanted)
    if driver is None and cuda_support.driver_version():
        pytest.skip("this machine has a driver")
    result = import_with_driver(tmp_path, driver, code=code) if driver else started(code)
    assert result.stdout.startswith(f"{asks}\n"), result.stderr
    assert why in result.stdout


def test_the_nvcc_of_pip_is_found_beside_other_packages(tmp_path, monkeypatch):
    nvcc = program(tmp_path / "nvidia/cu13/bin/nvcc", 'echo "release 13.0, V13.0.88"\n')
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    setup = setup_module()
    monkeypatch.setattr(setup.shutil, "which", lambda name: name if name == nvcc else None)
    assert setup.nvcc_path() is None
    monkeypatch.syspath_prepend(tmp_path)
    assert setup.nvcc_path() == nvcc
    assert setup.Nvcc(nvcc).name == "nvcc 13.0.88 (of pip)"


def test_a_free_threaded_python_gets_no_kernels(monkeypatch):
    monkeypatch.setitem(sysconfig.get_config_vars(), "Py_GIL_DISABLED", 1)
    monkeypatch.delenv("AMPCTX_KERNELS", raising=False)
    monkeypatch.delenv("AMPCTX_CUDA", raising=False)
    assert setup_module().why_no_kernels().startswith("a free-threaded Python lacks the stable ABI that they need")
