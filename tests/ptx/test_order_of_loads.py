"""The order of loads in the PTX of the kernels that walk elements."""

from __future__ import annotations

import re

WALKS = re.compile(r"\d(step|axpby|scale|lamb|l2norm)_kernel")
# Kernels for rounded states, by their template arguments: a branch for each list moves conversions about.
ROUNDS = re.compile(r"Lb1ELb\dELb\dENS\w?_5Table")
CONVERTS = "cvt.f32.f16"


def test_all_lists_are_loaded_before_one_is_converted(modules):
    """A conversion waits for its load, and the loads behind it would wait too."""
    entries = [entry for module in modules for entry in module.entries]
    walks = [entry for entry in entries if WALKS.search(entry.name) and not ROUNDS.search(entry.name)]
    assert len(walks) >= 84  # all of them
    for entry in walks:
        opcodes = [statement.text.split()[0] for statement in entry.body]
        vectors = [place for place, opcode in enumerate(opcodes) if opcode.startswith("ld.global.v4")]
        assert vectors, entry.name
        assert CONVERTS not in opcodes[vectors[0] : vectors[-1]], entry.name
        assert CONVERTS in opcodes[vectors[-1] :], entry.name
