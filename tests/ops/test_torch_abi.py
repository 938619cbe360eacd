"""csrc/torch_abi.h declares torch's C functions by itself: the compiler compares it with torch's own headers."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

CSRC = Path(__file__).parents[2] / "csrc"
HEADER = "torch_abi.h"
FUNCTION = re.compile(
    r"^(?:__attribute__\(\(weak\)\) )?(?:AOTITorchError |int32_t |const char\* ?)([a-z]\w+)\(", re.MULTILINE
)


def functions_in(header):
    return {*FUNCTION.findall(header), *(f"aoti_torch_dtype_{name}" for name in re.findall(r"OP\((\w+)\)", header))}


def compile_together(folder, header):
    """Compiles torch's declarations, then ours. C linkage makes a difference an error."""
    (folder / HEADER).write_text(header)
    source = folder / "check.cpp"
    source.write_text(f'#define USE_CUDA\n#include <torch/csrc/stable/c/shim.h>\n#include "{HEADER}"\n')
    include = Path(torch.__file__).parent / "include"
    command = [
        os.environ.get("CXX", "g++"),
        "-std=c++20",
        "-fsyntax-only",
        f"-I{include}",
        f"-iquote{CSRC}",
        str(source),
    ]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def header():
    return (CSRC / HEADER).read_text()


def test_declarations_are_those_of_torch(header, tmp_path):
    result = compile_together(tmp_path, header)
    assert result.returncode == 0, result.stderr
    assert len(functions_in(header)) > 45


DIFFERENCES = {
    "argument": ("aoti_torch_get_numel(AtenTensorHandle tensor, int64_t* numel)", "int64_t*", "int32_t*"),
    "argument-in-the-middle": (
        "torch_parallel_for(int64_t begin, int64_t end, int64_t grain,",
        "int64_t g",
        "int32_t g",
    ),
    "result": ("int32_t aoti_torch_layout_strided()", "int32_t", "int64_t"),
    "cuda": ("aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream)", "void**", "void*"),
}


@pytest.mark.parametrize(("line", "part", "wrong"), DIFFERENCES.values(), ids=DIFFERENCES.keys())
def test_a_difference_is_a_compile_error(header, tmp_path, line, part, wrong):
    assert header.count(line) == line.count(part) == 1
    result = compile_together(tmp_path, header.replace(line, line.replace(part, wrong)))
    assert result.returncode != 0
    assert "conflicting declaration" in result.stderr or "ambiguating new declaration" in result.stderr


def test_every_function_is_in_this_torch(header):
    """Those that are weak aside: null in a torch without CUDA, and before torch 2.13."""
    library = torch_cpu_symbols()
    missing = {name for name in functions_in(header) if name not in library}
    may_miss = {"aoti_torch_get_current_cuda_stream"}
    if torch.__version__ < "2.13":
        may_miss.add("torch_exception_get_what_without_backtrace")
    assert missing <= may_miss


def torch_cpu_symbols():
    path = Path(torch.__file__).parent / "lib/libtorch_cpu.so"
    output = subprocess.run(
        ["nm", "-D", "--defined-only", str(path)], check=True, capture_output=True, text=True
    ).stdout
    return {line.split()[-1].partition("@")[0] for line in output.splitlines()}
