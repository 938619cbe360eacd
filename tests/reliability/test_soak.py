"""A short version of ``soak.py``, and that it finds what it looks for."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import soak
from soak import Discrepancy, Run

SCRIPT = Path(__file__).with_name("soak.py")


@pytest.mark.full
@pytest.mark.parametrize(
    ("iterations", "length", "resume_every", "seed"),
    [(80, 20, 2, 2), (300, 30, 5, 1)],  # seeds with which each fault occurs
)
def test_iterations_lose_nothing(iterations, length, resume_every, seed):
    arguments = ["--iterations", iterations, "--length", length, "--resume-every", resume_every, "--seed", seed]
    result = subprocess.run(
        [sys.executable, "-W", "error", SCRIPT, *map(str, arguments)], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    counts = {kind: int(n) for kind, n in re.findall(r"^([a-z ]+): (\d+)$", result.stdout, re.MULTILINE)}
    assert counts["steps"] >= iterations
    assert counts["lost"] == 0
    assert counts["skips"] == counts["overflow"]
    assert all(counts[kind] > 0 for kind in (*soak.FAULTS, *soak.IN_CLOSURES, "kill")), counts
    assert counts["resume"] == 2 * counts["kill"]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("update_scale", "scale 0 is"),
        ("load", "under amp, .* without|rounded master"),
        ("freeze", "under amp, .* without|rounded master|differs"),
    ],
)
def test_a_fault_that_the_reference_is_not_told_of_is_found(monkeypatch, broken, message):
    def without_reference(self, *args):
        plain, self.plain = self.plain, Run(self.plan).plain
        original(self, *args)
        self.plain = plain

    original = getattr(Run, broken)
    monkeypatch.setattr(Run, broken, (lambda *_: None) if broken == "update_scale" else without_reference)
    with pytest.raises(Discrepancy, match=message):
        soak.soak(300, seed=1, length=50, resume_every=0)
