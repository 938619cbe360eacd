"""benchmarks/walk.py finds what a step enters, and docs/data_flow.md shows it."""

import subprocess
import sys

import pytest
import torch
import walk

from ampctx import ops


def test_functions_are_found_in_order():
    assert walk.walked(lambda: torch.ones(2).sum()) == []  # none of ampctx
    entries = walk.walked(lambda: ops.multi_tensor_scale([torch.ones(2)], [torch.ones(2)], torch.zeros(()), 2.0))
    assert entries[0] == walk.Entry(0, "kernels/ops.py", "multi_tensor_scale")
    assert {entry.depth for entry in entries} >= {0, 1}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="names of methods have no class before")
def test_the_page_shows_the_walk_of_a_step():
    """In a process of its own: what other tests have imported or set up is asked for on the way."""
    done = subprocess.run([sys.executable, walk.__file__, "step", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "AmpSession" not in done.stdout
    assert "FusedAdam.step  (optimizers/fused_adam.py)" in done.stdout
