"""The CPU kernels on ARM: setup.py builds the library with a cross compiler, and qemu runs the kernels. They write what
those of this machine write, to the last bit."""

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
from emulation_build import setup_module

ROOT = Path(__file__).parents[2]
CXX, QEMU, LIBC = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"

pytestmark = pytest.mark.skipif(
    not (shutil.which(CXX) and shutil.which(QEMU)), reason=f"needs {CXX} and {QEMU}: see docs/contributing.md"
)


def digests(cxx, build, folder, *runner):
    """What the program prints. ``build``: where setup.py compiles what has changed."""
    setup = setup_module()
    objects = setup.compile_all(cxx, None, build)
    setup.link(cxx, None, objects, build, folder / "_ops.so")
    kernels = [path for path in objects if "/cpu_" in path]
    program = str(folder / "kernels")
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-ffp-contract=off", f"-I{build / 'generated'}", f"-I{ROOT}"]
    source = str(Path(__file__).with_name("arm_kernels.cpp"))
    subprocess.run([cxx, *flags, source, *kernels, "-o", program], check=True)
    run = subprocess.run([*runner, program], capture_output=True, text=True, timeout=600, check=True)
    return run.stdout.splitlines()


def test_kernels_on_arm_write_what_those_of_this_machine_write(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    here = digests(os.environ.get("CXX", "g++"), ROOT / "build" / "here", tmp_path)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert digests(CXX, ROOT / "build" / "arm", tmp_path, QEMU, "-L", LIBC) == here
    assert len(here) == 32
