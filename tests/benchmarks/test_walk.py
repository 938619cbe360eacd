"""benchmarks/walk.py finds what a step enters."""

import re

import torch
import walk

from ampctx import ops


def test_functions_are_found_in_order():
    assert walk.walked(lambda: torch.ones(2).sum()) == []  # none of ampctx
    entries = walk.walked(lambda: ops.multi_tensor_scale([torch.ones(2)], [torch.ones(2)], torch.zeros(()), 2.0))
    assert entries[0] == walk.Entry(0, "kernels/ops.py", "multi_tensor_scale")
    assert {entry.depth for entry in entries} >= {0, 1}


def test_the_walk_of_a_step_is_printed(capsys):
    walk.main(["step"])
    printed = capsys.readouterr().out
    assert printed.startswith("step\n")
    assert "(optimizers/_base.py)" in printed
    assert re.search(r"^step: \d+ functions in \d+ files, \d+ calls$", printed, flags=re.M)
