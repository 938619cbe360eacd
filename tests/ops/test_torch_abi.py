"""csrc/torch_abi.h declares what torch has by itself: the compiler compares it with torch's headers."""

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


@pytest.fixture(scope="module")
def header():
    return (CSRC / HEADER).read_text()


def test_declarations_are_those_of_torch(header, tmp_path):
    """Torch's, then ours. C linkage makes a difference an error."""
    source = tmp_path / "check.cpp"
    source.write_text(f'#define USE_CUDA\n#include <torch/csrc/stable/c/shim.h>\n#include "{HEADER}"\n')
    includes = [f"-I{Path(torch.__file__).parent / 'include'}", f"-iquote{CSRC}"]
    command = [os.environ.get("CXX", "g++"), "-std=c++20", "-fsyntax-only", *includes, str(source)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert len(functions_in(header)) > 45


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
