"""What nvcc makes of the CUDA kernels: that they are in the build, how wide they access memory, that registers suffice.

The last is read from the PTX and from the assembler's report for one architecture. It says nothing about speed."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from ampctx import ops

CUDA = Path(__file__).parents[2] / "csrc" / "cuda"


def nvcc():
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    return next(filter(None, map(shutil.which, ["nvcc", *(f"{home}/bin/nvcc" for home in homes if home)])), None)


needs_nvcc = pytest.mark.skipif(nvcc() is None, reason="no nvcc")


@needs_nvcc
def test_the_build_has_the_cuda_kernels():
    """Where nvcc is, the library in use carries CUDA code for several generations, and imports without a GPU."""
    if os.environ.get("AMPCTX_CUDA") == "0":
        pytest.skip("built with AMPCTX_CUDA=0")
    assert ops.extension.build["cuda"], "built without nvcc though it is there: rebuild"
    archs = ops.extension.build["cuda_archs"]
    assert all(arch.startswith("sm_") for arch in archs[:-1])
    assert archs[-1].startswith("compute_")
    if not os.environ.get("AMPCTX_CUDA_ARCHS"):
        assert {"sm_75", "sm_80", "sm_90"} <= set(archs)
    assert "cuda" in ops.extension.backends or not torch.version.cuda


@pytest.fixture(scope="module", params=["adam", "axpby", "l2norm", "scale"])
def code(request, tmp_path_factory):
    """The PTX of each kernel that walks elements, and what the assembler says of it."""
    folder = tmp_path_factory.mktemp(request.param)
    command = [nvcc(), "-O3", "-std=c++17", "--fmad=false", "-arch=sm_80", "-cubin", "-Xptxas=-v", "--keep"]
    command += ["--keep-dir", str(folder), "-o", str(folder / "cubin"), str(CUDA / f"multi_tensor_{request.param}.cu")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (ptx,) = folder.glob("*.ptx")
    bodies = dict(re.findall(r"\.entry (\w+)\((?:.*?)\n\{(.*?)\n\}\n", ptx.read_text(), re.DOTALL))
    reports = re.split(r"Compiling entry function '(\w+)'", result.stderr)
    reports = dict(zip(reports[1::2], reports[2::2], strict=True))
    names = [name for name in bodies if re.search(r"step_kernel|axpby_kernel|scale_kernel|partial_kernel", name)]
    assert len(names) >= 5, "a table in the parameters in four sizes, and one on the device"
    return {name: (bodies[name], reports[name]) for name in names}


def lists_of(name):
    return int(re.search(r"Table(?:ILi|<)(\d+)", name).group(1))


@needs_nvcc
def test_kernels_use_no_stack(code):
    """Neither spilled registers nor arrays that are indexed at run time."""
    for name, (_, report) in code.items():
        assert re.search(r"\b0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", report), (name, report)


@needs_nvcc
def test_pointers_are_known_to_be_global(code):
    """Those of a table on the device too: generic accesses take longer."""
    for name, (ptx, _) in code.items():
        assert re.search(r"\bld\.global", ptx), name
        assert not re.findall(r"\s(?:ld|st)(?:\.volatile)?\.(?:v\d\.)?[bfsu]\d+.*", ptx), name


@needs_nvcc
def test_accesses_are_16_bytes_wide(code):
    """Each list has three: both fours of fp32, eight elements of 16 bits; twice where a loop takes two vectors."""
    for name, (ptx, _) in code.items():
        walked = 1 if "l2norm" in name else lists_of(name)
        read = walked - ("axpby" in name or "scale" in name)
        written = {"l2norm": 0, "axpby": 1, "scale": 1}.get(
            next((k for k in ("l2norm", "axpby", "scale") if k in name), ""), walked - 1
        )
        vectors = 2 if walked <= 2 else 1
        wide = {access: len(re.findall(rf"\b{access}\.global\.v4\.[bu]32", ptx)) for access in ("ld", "st")}
        assert wide == {"ld": 3 * read * vectors, "st": 3 * written * vectors}, name


@needs_nvcc
def test_all_lists_are_loaded_before_one_is_converted(code):
    """A conversion waits for its load, and the loads behind it would wait too."""
    for name, (ptx, _) in code.items():
        loads = [match.start() for match in re.finditer(r"\bld\.global\.v4", ptx)]
        assert max(loads) < ptx.index("cvt.f32.f16"), name
