"""The CPU kernels on ARM: setup.py builds the library with a cross compiler, and qemu runs the kernels."""

import importlib.util
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CXX, QEMU, LIBC = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"

pytestmark = pytest.mark.skipif(
    not (shutil.which(CXX) and shutil.which(QEMU)), reason=f"needs {CXX} and {QEMU}: see docs/contributing.md"
)


def test_kernels_on_arm_agree_with_plain_loops(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    spec = importlib.util.spec_from_file_location("ampctx_setup", ROOT / "setup.py")
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    build = ROOT / "build" / "arm"  # setup.py compiles there what has changed
    objects = setup.compile_all(CXX, None, build)
    setup.link(CXX, None, objects, build, tmp_path / "_ops.so")
    kernels = [path for path in objects if "/cpu_" in path]
    program = str(tmp_path / "kernels")
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-ffp-contract=off", f"-I{build / 'generated'}", f"-I{ROOT}"]
    source = str(Path(__file__).with_name("arm_kernels.cpp"))
    subprocess.run([CXX, *flags, source, *kernels, "-o", program], check=True)
    done = subprocess.run([QEMU, "-L", LIBC, program], capture_output=True, text=True, timeout=600)
    assert done.stdout == 'baseline of "baseline": 0 failures\n', done.stderr
    assert done.returncode == 0
