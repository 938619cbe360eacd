"""benchmarks/walk.py finds what a step enters."""

import re

import walk


def test_the_walk_of_a_step_is_printed(capsys):
    walk.main(["step"])
    printed = capsys.readouterr().out
    assert printed.startswith("step\n")
    assert "(optimizers/_base.py)" in printed
    assert re.search(r"^step: \d+ functions in \d+ files, \d+ calls$", printed, flags=re.M)
