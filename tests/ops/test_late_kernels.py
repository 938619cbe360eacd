"""Kernels that are registered when the first tensor of their device type comes: everywhere, on some devices, nowhere.

The emulated CUDA kernels stand in the place of those for GPUs, and CPU tensors in the place of CUDA tensors.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import warnings

import pytest
import torch
from backends import EMULATED, Backend
from emulation_build import module_of
from optimizer_calls import STEP_OPS, make_call

from ampctx._errors import ExtensionError
from ampctx.kernels import definitions
from ampctx.kernels.extension import Extension, LateKernels

CPU, OTHER = torch.device("cpu"), torch.device("meta")
PROBLEM = "the kernels were built for something else"
_number = itertools.count()


@pytest.fixture
def late(emulation):
    """Makes a namespace of ops whose late kernels have these problems."""
    defined = []

    def make(problems, required=""):
        namespace = f"ampctx_late_{next(_number)}"
        asked = []

        def ask():
            asked.append(1)
            return problems

        def register(name):
            assert module_of(emulation._name).register("cpu", name) == 0

        kernels = LateKernels(namespace, "cpu", ask, register, definitions.define, required)
        found = Extension(True, ("cpu",), late=kernels)
        defined.append(definitions.define(namespace, lambda: found))
        return Backend("late", namespace=namespace), found, asked

    return make


def scaled(backend):
    x = [torch.ones(3)]
    backend.scale(x, x, torch.zeros(()), 2.0)
    return x[0].tolist()


def has_kernels(namespace):
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"{namespace}::multi_tensor_scale", "CPU")


def test_the_first_call_registers_them(late, emulation):
    backend, found, asked = late({CPU: ""})
    assert not has_kernels(backend.namespace)
    assert asked == []
    launches = emulation.ampctx_test_launches()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert scaled(backend) == [2, 2, 2]
        assert emulation.ampctx_test_launches() == launches + 1, "the call itself ran on plain torch"
        assert scaled(backend) == [2, 2, 2]
    assert emulation.ampctx_test_launches() == launches + 2
    assert has_kernels(backend.namespace)
    assert found.backends == ("cpu",)
    assert found.serves("cpu")
    assert len(asked) == 1


def test_tensors_of_other_devices_register_nothing(late):
    backend, found, asked = late({CPU: ""})
    with pytest.raises(RuntimeError, match="takes tensors of one device"):
        backend.ops.multi_tensor_scale(
            [torch.ones(3, device="meta")], [torch.ones(3)], torch.zeros(()), torch.tensor(2.0)
        )
    assert not found.serves("cuda")
    assert asked == []
    assert not has_kernels(backend.namespace)


def test_a_call_that_is_refused_is_refused_once_they_are_registered(late):
    """Tensors of a layout that no kernel is registered for come to the fallback again."""
    backend, _, _ = late({CPU: ""})
    sparse = [torch.ones(3).to_sparse()]
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"src\[0\]"):
            backend.scale(sparse, sparse, torch.zeros(()), 2.0)


def test_devices_that_they_do_not_run_on_are_served_by_plain_torch(late, emulation):
    backend, found, asked = late({CPU: PROBLEM, OTHER: PROBLEM})
    launches = emulation.ampctx_test_launches()
    with pytest.warns(RuntimeWarning, match=f"ampctx runs on plain torch on CPU, slower: {PROBLEM}$") as record:
        assert [scaled(backend), scaled(backend)] == [[2, 2, 2]] * 2
    assert len(record) == len(asked) == 1
    assert emulation.ampctx_test_launches() == launches
    assert not has_kernels(backend.namespace)
    assert found.backends == ()
    assert found.reason == PROBLEM
    assert not found.serves("cpu")


@pytest.mark.parametrize(("good", "bad"), [(CPU, OTHER), (OTHER, CPU)], ids=["kernels", "plain"])
def test_each_device_has_what_runs_there(late, emulation, good, bad):
    backend, found, _ = late({good: "", bad: PROBLEM})
    launches = emulation.ampctx_test_launches()
    words = f"{PROBLEM}, or hide {bad} with CUDA_VISIBLE_DEVICES"
    with pytest.warns(RuntimeWarning, match=f"ampctx runs on plain torch on {bad}, slower: {words}$") as record:
        assert [scaled(backend), scaled(backend)] == [[2, 2, 2]] * 2
    assert len(record) == 1
    assert emulation.ampctx_test_launches() == launches + (2 if good is CPU else 0)
    assert found.reason == words
    assert list(found.apart) == [good]
    # Lists are handed over as tensors: their kernels are found anew for each call.
    assert found.backends == ()
    assert not found.serves("cpu")
    for optimizer in STEP_OPS:
        call = make_call(backend, optimizer, [3, 0, (2, 5)])
        expected = call.clone().run(EMULATED) if good is CPU else call.clone().run(Backend("plain"))
        call.run(backend).assert_agrees(expected)
    sparse = [torch.ones(3).to_sparse()]
    with pytest.raises(RuntimeError, match=r"src\[0\]"):
        backend.scale(sparse, sparse, torch.zeros(()), 2.0)


@pytest.mark.parametrize("problems", [{CPU: PROBLEM}, {OTHER: "", CPU: PROBLEM}], ids=["nowhere", "somewhere"])
def test_required_kernels_that_do_not_run_are_an_error_in_each_call(late, problems):
    backend, _, _ = late(problems, "cuda")
    for _ in range(2):
        with pytest.raises(ExtensionError, match=f"AMPCTX_REQUIRE_EXTENSION=cuda, .* cannot run: {PROBLEM}"):
            scaled(backend)


def test_threads_that_come_first_together_register_them_once(late):
    backend, found, asked = late({CPU: ""})
    barrier, results = threading.Barrier(8), []

    def run():
        barrier.wait()
        results.append(scaled(backend))

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[2, 2, 2]] * 8
    assert len(asked) == 1
    assert found.late is None


COMPILED_CALL = """
import sys, torch
sys.path[:0] = sys.argv[2:]
from ampctx.kernels import definitions
from ampctx.kernels.extension import Extension, LateKernels
from pathlib import Path
import ctypes
from emulation_build import module_of
library = ctypes.CDLL(sys.argv[1])
register = lambda name: module_of(sys.argv[1]).register("cpu", name)
problems = lambda: {torch.device("cpu"): ""}
found = Extension(True, ("cpu",), late=LateKernels("late", "cpu", problems, register, definitions.define))
defined = definitions.define("late", lambda: found)

def step(x, flag):
    torch.ops.late.multi_tensor_scale(x, x, flag, torch.tensor(2.0))
    return torch.ops.late.multi_tensor_l2norm(x, flag, False)[0] * 2

for _ in range(2):
    print(torch.compile(step, fullgraph=True, backend="aot_eager")([torch.ones(4)], torch.zeros(())).item())
print(library.ampctx_test_launches())
"""


def test_a_compiled_graph_may_come_first(emulation):
    tests = os.path.dirname(os.path.dirname(__file__))
    command = [sys.executable, "-c", COMPILED_CALL, emulation._name, f"{tests}/cuda_emulation"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    first, second, launches = result.stdout.split()
    assert first == second == "8.0"
    assert int(launches) >= 4


IMPORT = """
import torch, ampctx
assert not torch.cuda.is_initialized()
from ampctx.kernels import ops
def kernel(): return torch._C._dispatch_has_kernel_for_dispatch_key("ampctx::multi_tensor_scale", "CUDA")
assert not kernel()
assert ops.extension.late is not None
x = [torch.ones(3, device="cuda")]
ops.multi_tensor_scale(x, x, torch.zeros((), device="cuda"), 2.0)
assert kernel()
assert ops.extension.late is None
print(ops.extension.backends, x[0].tolist())
"""


@pytest.mark.cuda
def test_the_import_leaves_cuda_alone_and_the_first_tensor_brings_its_kernels():
    result = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", IMPORT], capture_output=True, text=True
    )
    assert result.stdout == "('cpu', 'cuda') [2.0, 2.0, 2.0]\n", result.stderr
