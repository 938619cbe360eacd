"""Plans over the CUDA kernels, emulated: how many launches an iteration takes, and the bits of plain code."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kit import with_plans

TESTS = Path(__file__).parents[1]

RUN = """
import ctypes, json, sys, torch

library, level, clips, kind, tensors = sys.argv[1], sys.argv[2], sys.argv[3] == "clip", sys.argv[4], int(sys.argv[5])
from ampctx import clip_grad_norm_, optimizers
from ampctx.amp import AmpSession
from ampctx.kernels.plan import Plan
from kit import INF

emulation = ctypes.CDLL(library)
emulation.ampctx_test_launches.restype = ctypes.c_int64
served, run = [], Plan.run
def counted(*args, **kwargs):
    found = run(*args, **kwargs)
    served.append(found is not None)
    return found
Plan.run = counted

torch.manual_seed(0)
model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(i % 5 + 1)) for i in range(tensors)])
session, optimizer = AmpSession(), getattr(optimizers, kind)(model.parameters(), lr=0.1)
session.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)

launches = []
def phase(work):
    before = emulation.ampctx_test_launches()
    result = work()
    launches.append(emulation.ampctx_test_launches() - before)
    return result

for step in range(6):
    launches.clear(), served.clear()
    grads = [torch.randn_like(p) * 2.0**8 for p in model]
    if step == 3:
        grads[1][0] = INF
    block = session.scale_loss(torch.ones(()), optimizer)
    phase(block.__enter__)
    for p, grad in zip(model, grads):
        p.grad = grad
    phase(lambda: block.__exit__(None, None, None))
    if clips:
        phase(lambda: clip_grad_norm_(session.master_params(optimizer), 1.0))
    phase(optimizer.step)
    optimizer.zero_grad()
weights = [w.tolist() for w in session.master_params(optimizer)]
facts = {"launches": launches, "served": served, "skipped": session.skipped_steps(optimizer)}
print(json.dumps({**facts, "scale": session.loss_scales[0].scale.item(), "weights": weights}))
"""


@pytest.fixture(scope="module")
def emulated(emulation, tmp_path_factory):
    """A folder with the package, whose library is the emulation, and that library."""
    folder = tmp_path_factory.mktemp("emulated")
    shutil.copytree(TESTS.parent / "ampctx", folder / "ampctx", ignore=shutil.ignore_patterns("_ops.so", "__pycache__"))
    (folder / "ampctx" / "_ops.so").symlink_to(emulation._name)
    return folder, emulation._name


def run(emulated, plans, *arguments):
    folder, library = emulated
    path = os.pathsep.join([str(folder), str(TESTS)])
    env = {**os.environ, "AMPCTX_PLAN": plans, "PYTHONPATH": path, "AMPCTX_REQUIRE_EXTENSION": "1"}
    command = [sys.executable, "-c", RUN, library, *map(str, arguments)]
    result = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


# Of the entry, which makes the factors of the block, of the exit, of a clip, and of the step.
CASES = [
    ("O2", "clip", "FusedAdam", 161, [1, 1, 0, 1]),
    ("O1", "clip", "FusedAdam", 161, [1, 1, 2, 1]),
    ("O1", "", "FusedAdam", 161, [1, 1, 1]),
    ("O2", "", "FusedAdam", 161, [1, 1, 1]),
    ("O2", "clip", "FusedLAMB", 161, [1, 1, 0, 2]),
    ("O2", "clip", "FusedSGD", 3000, [1, 3, 0, 5]),
]


@with_plans
@pytest.mark.full(but=1)
@pytest.mark.parametrize(("level", "clip", "kind", "tensors", "launches"), CASES)
def test_launches_of_an_iteration(emulated, level, clip, kind, tensors, launches):
    planned, plain = (run(emulated, plans, level, clip, kind, tensors) for plans in "10")
    assert planned.pop("launches") == launches
    assert planned.pop("served") == [True, True]
    assert plain.pop("served") == []
    assert plain.pop("launches") is not None
    assert planned == plain
    assert planned["skipped"] == 1
