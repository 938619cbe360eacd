"""A kernel that lacks memory raises torch.OutOfMemoryError, as torch's own ops do on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ampctx._plan import PLANS

TESTS = Path(__file__).parents[1]

# Little memory is left to the process. The call needs much for a workspace, and none before.
CALLS = """
import os, re, resource, sys, torch
from ampctx import optimizer_ops
from ampctx.kernels import ops
from ampctx.kernels.plan import PlannedCall, make_plan

weight = torch.empty(2**28, dtype=torch.bfloat16)  # memory that nothing touches
weights, flag = [weight] * 1000, torch.zeros(())
steps, one = [torch.zeros(()) for _ in weights], torch.ones(())
options = dict(beta1=0.9, beta2=0.9, eps=1e-8, weight_decay=0.1)
lists = {name: weights for name in ("grads", "params", "exp_avgs", "exp_avg_sqs")}
lamb = {**options, "global_grad_norm": one, "lr": 0.1, "inv_scale": one, "found_inf": flag, "extras": []}
plan = make_plan([], [PlannedCall("multi_tensor_unscale_l2norm", [weights], ())])
norms = torch.zeros(()), torch.zeros(0)
calls = {
    "l2norm": lambda: ops.multi_tensor_l2norm(weights, flag),
    "unscale_l2norm": lambda: ops.multi_tensor_unscale_l2norm(weights, flag, 0.5),
    "lamb": lambda: optimizer_ops.lamb(**lists, **lamb, steps=steps),
    "plan": lambda: plan.run([], [(flag, 0.5, False, *norms)]),
    "torch.ops": lambda: torch.ops.ampctx.multi_tensor_l2norm(weights, flag, False),
}
if "compiled" in sys.argv:  # whose import takes seconds
    calls["compiled"] = torch.compile(lambda: ops.multi_tensor_l2norm(weights, flag), backend="eager")
for name in sys.argv[1:]:
    if os.fork() == 0:
        break
    assert os.wait()[1] == 0
else:
    sys.exit()
size = int(re.search(r"VmSize:\\s+(\\d+)", open("/proc/self/status").read()).group(1)) * 1024
resource.setrlimit(resource.RLIMIT_AS, (size + 2**26, size + 2**26))
try:
    calls[name]()
except RuntimeError as error:
    print(name, type(error).__name__, str(error).replace("\\n", " "))
assert (flag.item(), float(one), [s.item() for s in steps[:2]]) == (0.0, 1.0, [0.0, 0.0])
"""


BY_PYTHON = ("l2norm", "unscale_l2norm", "lamb", *(["plan"] if PLANS else []))


@pytest.mark.parametrize("names", [(*BY_PYTHON, "torch.ops"), pytest.param(("compiled",), marks=pytest.mark.full)])
def test_a_workspace_that_cannot_be_had(names):
    """Where no Python of ampctx is between, the error is a RuntimeError that says the same."""
    # One thread: others would take their share of the memory at the first call.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CALLS, *names]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    told = [line.split(" ", 2) for line in result.stdout.splitlines()]
    assert [name for name, *_ in told] == [*names]
    for name, kind, words in told:
        assert kind == ("OutOfMemoryError" if name in BY_PYTHON else "RuntimeError")
        assert words.startswith("ampctx: out of memory: no room on cpu for ")
        if torch.__version__ >= "2.13" and name in BY_PYTHON:
            assert "DefaultCPUAllocator: can't allocate memory: you tried to allocate" in words


ERRORS = """
#include <cuda_runtime.h>

#include <cstdio>

#include "cuda/check_cuda.h"
#include "torch_abi.h"

using namespace ampctx;

template <class Call>
void report(const Call& call) {
  try {
    call();
  } catch (const std::exception& error) {
    std::puts(error.what());
  }
}

int main() {
  const int64_t petabyte = int64_t{1} << 50, one = 1;
  const torch_abi::Device nowhere = {aoti_torch_device_type_cuda(), 99};
  report([] { cuda::check_cuda(cudaErrorMemoryAllocation, "launch of kernel"); });
  report([] { cuda::check_cuda(cudaErrorInvalidValue, "launch of kernel"); });
  report([&] { torch_abi::empty(&petabyte, aoti_torch_dtype_uint8(), torch_abi::Device::cpu()); });
  report([&] { torch_abi::empty(&one, aoti_torch_dtype_uint8(), nowhere); });
  for (const char* words : {"CUDA out of memory. Tried to allocate 20.00 GiB.", "CUDA error: out of memory",
                            "CUDA error: an illegal memory access was encountered"}) {
    std::puts(torch_abi::tells_of_memory(words) ? "memory" : "something else");
  }
}
"""


def test_which_errors_are_of_memory(tmp_path):
    """CUDA's own, and torch's by what it says of them. The runtime is the emulated one, torch is the real one."""
    torch_lib = Path(torch.__file__).parent / "lib"
    (tmp_path / "errors.cpp").write_text(ERRORS)
    command = [os.environ.get("CXX", "g++"), "-std=c++17", str(tmp_path / "errors.cpp"), "-o", str(tmp_path / "errors")]
    command += [f"-I{TESTS / 'cuda_emulation'}", f"-iquote{TESTS.parent / 'csrc'}"]
    command += [f"-L{torch_lib}", f"-Wl,-rpath,{torch_lib}", "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10"]
    subprocess.run(command, check=True)
    result = subprocess.run([str(tmp_path / "errors")], capture_output=True, text=True, check=True)
    lines = result.stdout.splitlines()
    alloc = next(i for i, line in enumerate(lines) if "no room" in line)
    assert lines[0].startswith("ampctx: out of memory: launch of kernel: ")
    assert lines[1].startswith("ampctx: launch of kernel: ")
    assert lines[alloc].startswith(f"ampctx: out of memory: no room on cpu for {2**50} elements of torch.uint8")
    if torch.__version__ >= "2.13":  # before, torch tells nobody what its error was
        assert any(line.startswith("ampctx: torch's aoti_torch_empty_strided reported an error: ") for line in lines)
    assert lines[-3:] == ["memory", "memory", "something else"]
