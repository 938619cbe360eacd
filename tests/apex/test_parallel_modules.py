"""apex.parallel.LARC, which clients use as a module."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import apex
import pytest
import torch
from apex.parallel.LARC import LARC

from ampctx import amp, optimizers

ROOT = Path(__file__).resolve().parents[2]


def test_import_apex_brings_the_packages():
    assert set(apex.__all__) >= {"normalization", "parallel"}
    program = "import apex; print(apex.parallel.Reducer, apex.normalization.FusedLayerNorm)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "ampctx-apex")])}
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert "apex.parallel.distributed.Reducer" in result.stdout


def test_larc_is_a_module_with_the_class():
    assert apex.parallel.LARC is importlib.import_module("apex.parallel.LARC")
    assert LARC is optimizers.LARC is apex.parallel.LARC.LARC


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_larc_trains(level):
    model = torch.nn.Linear(4, 2)
    optimizer = LARC(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4), 0.02, clip=False)
    before = model.weight.detach().clone()
    amp.initialize(model, optimizer, opt_level=level, loss_scale=4.0, verbosity=0)
    with amp.scale_loss(model(torch.ones(3, 4)).float().square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert not torch.equal(model.weight.float(), before)
