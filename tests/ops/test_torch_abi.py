"""csrc/torch_abi.h and csrc/python_abi.h declare what torch has by themselves: the compiler compares them with torch's
headers."""

import os
import re
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch

CSRC = Path(__file__).parents[2] / "csrc"
HEADER = "torch_abi.h"
PYTHON = Path(sysconfig.get_paths()["include"], "Python.h")
FUNCTION = re.compile(
    r"^(?:__attribute__\(\(weak\)\) )?(?:AOTITorchError |int32_t |const char\* ?)([a-z]\w+)\(", re.MULTILINE
)


def functions_in(header):
    return {*FUNCTION.findall(header), *(f"aoti_torch_dtype_{name}" for name in re.findall(r"OP\((\w+)\)", header))}


def assert_compiles(folder, text, *flags):
    """With torch's headers, and with ours."""
    source = folder / "check.cpp"
    source.write_text(text)
    includes = [f"-I{Path(torch.__file__).parent / 'include'}", f"-iquote{CSRC}", *flags]
    command = [os.environ.get("CXX", "g++"), "-std=c++20", "-fsyntax-only", *includes, str(source)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def header():
    return (CSRC / HEADER).read_text()


def test_declarations_are_those_of_torch(header, tmp_path):
    """Torch's, then ours. C linkage makes a difference an error."""
    assert_compiles(tmp_path, f'#define USE_CUDA\n#include <torch/csrc/stable/c/shim.h>\n#include "{HEADER}"\n')
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


# --- csrc/python_abi.h ------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not PYTHON.exists(), reason="this Python came without its headers")
def test_declarations_are_those_of_dlpack(tmp_path):
    pairs = {
        **{f"DLTensor::{name}": f"DLTensor::{name}" for name in ("data", "device", "dtype", "strides", "byte_offset")},
        "DLTensor::dim": "DLTensor::ndim",
        "DLTensor::sizes": "DLTensor::shape",
        "DLPackExchange::view": "DLPackExchangeAPI::dltensor_from_py_object_no_sync",
    }
    same = "".join(
        "static_assert(offsetof(ampctx::python_abi::{}, {}) == offsetof({}, {}));\n".format(
            *ours.split("::"), *theirs.split("::")
        )
        for ours, theirs in pairs.items()
    )
    text = f"""#include "python_abi.h"
#include <ATen/dlpack.h>
#include <cstddef>
{same}
static_assert(sizeof(ampctx::python_abi::DLTensor) == sizeof(DLTensor));
static_assert(ampctx::python_abi::kDLCPU == kDLCPU && ampctx::python_abi::kDLCUDA == kDLCUDA);
static_assert(ampctx::python_abi::kDLInt == kDLInt && ampctx::python_abi::kDLFloat == kDLFloat);
static_assert(ampctx::python_abi::kDLBfloat == kDLBfloat);
"""
    assert_compiles(tmp_path, text, f"-I{PYTHON.parent}")
