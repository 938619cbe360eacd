"""The benchmarks run, check what they time, and write what they promise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OPTIMIZERS = ("FusedAdam", "FusedSGD", "FusedAdagrad", "FusedLAMB", "FusedMixedPrecisionLamb", "FusedNovoGrad", "LARC")


def tail(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", str(ROOT / "benchmarks" / "tail.py"), *map(str, arguments)]
    # The package of this tree, not another that is installed; one thread, as several wait for each other on busy cores.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_tail_writes_figures_of_checked_steps(level, tmp_path):
    file = tmp_path / "tail.json"
    done = tail("--model", "tiny5000", "--opt-level", level, "--rounds", 2, "--json", file)
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    figures = report["figures"]
    assert (report["device"], report["model"], report["opt_level"]) == ("cpu", "tiny5000", level)
    assert (figures["tensors"], figures["elements"]) == (5000, 12_799_467)
    assert figures["check"]["steps_compared"] == 5
    for name in ("ampctx_ms", "torch_ms", "torch_over_ampctx", "copy_GB_per_s"):
        assert len(figures[name]["samples"]) == 2
        assert 0 < figures[name]["q1"] <= figures[name]["median"] <= figures[name]["q3"]
    assert str(tmp_path) not in file.read_text()
    assert "torch / ampctx" in done.stdout


def test_split_is_exact_on_some_patterns():
    command = [sys.executable, "-W", "error", str(ROOT / "benchmarks" / "split_exact.py"), "--every", "4099"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"{-(-(1 << 32) // 4099)} patterns came back")


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, "torch-Adam"])
def test_tail_of_each_optimizer_agrees_with_its_peer(optimizer, tmp_path):
    """With clipping at O2; tail.py compares the weights and fails where they differ."""
    file = tmp_path / "tail.json"
    options = ("--model", "digits", "--opt-level", "O2", "--optimizer", optimizer, "--clip", "--rounds", 2)
    done = tail(*options, "--json", file)
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    assert (report["optimizer"], report["clip"]) == (optimizer, True)
    assert report["peer"] in done.stdout
    assert "--clip" in report["command"]
    assert report["figures"]["check"]["overflow_step_changes_nothing"] is True


def test_tail_knows_the_shapes_of_resnet50(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from shapes import Parameters

    sizes = [p.numel() for p in Parameters("resnet50").parameters()]
    assert (len(sizes), sum(sizes)) == (161, 25_557_032)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(("--rounds", 1), "--rounds: 1 is too few", id="rounds"),
        pytest.param(("--json", "no/such/folder/tail.json"), "--json: there is no directory", id="json-in-no-folder"),
    ],
)
def test_tail_refuses(arguments, message):
    done = tail(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
