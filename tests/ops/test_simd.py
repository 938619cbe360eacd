"""The inner loops of every instruction set give the same bits, and AMPCTX_SIMD picks among them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from emulation_build import generate

from ampctx.kernels import ops

# Goes on in a process for each instruction set, of those in the arguments, which has torch imported.
EACH = """
import os, sys, torch
sys.path.insert(0, sys.argv[1])
for simd in sys.argv[2:]:
    if os.fork() == 0:
        break
    assert os.wait()[1] == 0
else:
    sys.exit()
os.environ["AMPCTX_SIMD"] = simd
"""

DIGEST = """
import hashlib
from ampctx.kernels import ops
from ampctx.kernels.reference_steps import WRITE_BACKS
from backends import ALL_FLOATS, COMPILED
from optimizer_calls import STEP_OPS, WITH_CODES, make_call, takes
generator = torch.Generator().manual_seed(0)
digest = hashlib.sha256()
def add(*tensors):
    for t in tensors:
        digest.update(t.reshape(-1).view(torch.uint8).numpy().tobytes())
bits = torch.arange(1 << 16).to(torch.int32).to(torch.int16)
wide = torch.randint(-(1 << 31), 1 << 31, (200_003,), generator=generator, dtype=torch.int64).to(torch.int32)
inputs = [bits.view(torch.float16), bits.view(torch.bfloat16), wide.view(torch.float32),
          torch.randn(5003, generator=generator), torch.randn(5003, generator=generator, dtype=torch.float64)]
flag = torch.zeros(())
for x in inputs:
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        out = torch.empty_like(x, dtype=dtype)
        ops.multi_tensor_scale([x], [out], flag, 0.3)
        add(out)
    y = torch.randn(x.shape, generator=generator)
    out = torch.empty_like(y)
    ops.multi_tensor_axpby([x], [y], [out], flag, 0.3, -1.7)
    add(out)
    finite = [x.nan_to_num(0.0, 0.0, 0.0).clamp(-1e4, 1e4), x[:17].nan_to_num(0.0, 0.0, 0.0).clamp(-1e4, 1e4)]
    for n in (1, 15, 16, 17, 2047, 2049):
        add(*ops.multi_tensor_unscale_l2norm([finite[0][:n], *finite], flag, 0.3, per_tensor=True))
# An output of 32 MB is written past the caches, with instructions of each set.
wide = torch.empty(8 << 20)
ops.multi_tensor_scale([bits.view(torch.float16).repeat(128)], [wide], flag, 0.3)
add(wide)
for optimizer in STEP_OPS:
    for write_back in WRITE_BACKS:
        for param in filter(lambda dtype: takes(write_back, dtype), ALL_FLOATS):
            call = make_call(COMPILED, optimizer, [2049, 17, 5], param=param, write_back=write_back)
            add(*(t for _, t in call.run(COMPILED, times=2).tensors()))
for optimizer in WITH_CODES:
    for state in (torch.bfloat16, "8bit"):
        for stochastic in (False, True):
            call = make_call(COMPILED, optimizer, [2049, 17, 5], state=state, stochastic_state=stochastic)
            add(*(t for _, t in call.run(COMPILED, times=2).tensors()))
print(ops.extension.build["simd_used"], digest.hexdigest())
"""


def run(code, *sets):
    command = [sys.executable, "-c", EACH + code, str(Path(__file__).parent), *sets]
    environment = {**os.environ, "AMPCTX_REQUIRE_EXTENSION": "cpu", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_instruction_sets_agree_to_the_last_bit():
    built = ops.extension.build["simd"]
    usable = built[: built.index(ops.extension.build["simd_used"]) + 1]
    result = run(DIGEST, *usable)
    assert result.returncode == 0, result.stderr
    results = dict(line.split() for line in result.stdout.splitlines())
    assert [*results] == [*usable]
    assert len(set(results.values())) == 1, results


def test_an_unknown_instruction_set_is_an_error():
    code = "from ampctx import ops; ops.multi_tensor_l2norm([torch.ones(3)], torch.zeros(()))"
    result = run(code, "sse9")
    assert result.returncode == 1
    assert "RuntimeError: AMPCTX_SIMD is sse9, expected baseline, avx2 or avx512" in result.stderr


@pytest.mark.parametrize("name", ["simd", "simd_optimizers"])
def test_inner_loops_share_no_function(tmp_path, name):
    """A function that several instruction sets define would be taken from any of them, and crash on older machines."""
    source = Path(__file__).parents[2] / f"csrc/cpu/{name}.cpp"
    cxx, out = os.environ.get("CXX", "g++"), tmp_path / "simd.o"
    command = [cxx, "-std=c++17", "-O0", "-DAMPCTX_SIMD_NAME=x", *generate()[1], "-c", str(source), "-o", str(out)]
    subprocess.run(command, check=True)
    names = subprocess.run(["nm", "-C", "--defined-only", str(out)], check=True, capture_output=True, text=True).stdout
    shared = [line for line in names.splitlines() if line.split()[1] in "TWVu"]
    assert shared == []
    assert re.search(r" [DR] .*_x$", names, flags=re.MULTILINE), "the table of AMPCTX_SIMD_NAME"
