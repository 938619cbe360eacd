"""The benchmarks run, check what they time, and write what they promise. No time is asserted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import bf16
import host
import kernels
import loop
import measuring
import offload
import ops
import peers
import pytest
import report
import resume
import suite
import tail
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def small_passes(monkeypatch):
    """Little memory to walk for bandwidth and caches: these runs are not for their figures."""
    monkeypatch.setattr(measuring, "FLUSH_BYTES", 1024)
    monkeypatch.setattr(measuring, "LEAST_ELEMENTS", 1024)


def run(script, tmp_path, *arguments):
    """The figures that a script writes, without the name of its report."""
    file = tmp_path / "figures.csv"
    file.unlink(missing_ok=True)
    script.main([*map(str, arguments), "--csv", str(file)])
    assert str(tmp_path) not in file.read_text()
    found = measuring.read(file)
    assert len({row.figure.split("/")[0] for row in found.values()}) == 1
    assert {row.command.split()[1] for row in found.values()} == {f"benchmarks/{Path(script.__file__).name}"}
    figures = {figure.partition("/")[2]: float(row.value) for figure, row in found.items()}
    for figure, value in figures.items():
        if figure.endswith(("/time", "/ratio", "/bandwidth", "memory")):
            assert value > 0, figure
    return figures


def sides(figures, case):
    return [f.split("/")[1] for f in figures if f.startswith(f"{case}/") and f.endswith("/time")]


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_tail_writes_figures_of_checked_steps(level, tmp_path):
    options = ("--model", "digits", "--opt-level", level, "--rounds", 2, "--against", "torch-fused,torch-default")
    assert sides(run(tail, tmp_path, *options), "tail") == ["ampctx", "torch-fused", "torch-default"]
    (found,) = {row._replace(figure="", value="", unit="") for row in measuring.read(tmp_path / "figures.csv").values()}
    assert f"torch {torch.__version__}" in found.machine


@pytest.mark.full(but=2)
@pytest.mark.parametrize("optimizer", peers.OPTIMIZERS)
def test_tail_of_each_optimizer_agrees_with_its_peer(optimizer, tmp_path):
    """With clipping at O2; tail.py compares the weights and fails where they differ."""
    run(tail, tmp_path, "--model", "digits", "--optimizer", optimizer, "--clip", "--rounds", 2)


def test_tail_of_shards(tmp_path):
    run(tail, tmp_path, "--model", "digits", "--opt-level", "O1", "--clip", "--ranks", 3, "--rounds", 2)
    with pytest.raises(SystemExit):
        run(tail, tmp_path, "--model", "digits", "--opt-level", "O2", "--ranks", 3)


def test_tail_fails_where_weights_differ(tmp_path, monkeypatch):
    elsewhere = {"torch-fused": lambda params: torch.optim.AdamW(params, lr=0.5)}
    monkeypatch.setattr(tail, "peers_of", lambda *_: elsewhere)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        run(tail, tmp_path, "--model", "digits", "--rounds", 2)
    assert not (tmp_path / "figures.csv").exists()


def test_ops_writes_a_case_for_each_op(tmp_path):
    found = run(ops, tmp_path, "--model", "digits", "--rounds", 2, "--optimizer", ",".join(peers.OPTIMIZERS))
    cases = ["unscale", "axpby", "l2norm", *(f"{name}.step" for name in peers.OPTIMIZERS)]
    assert all("ampctx" in sides(found, case) and len(sides(found, case)) > 1 for case in cases)


def test_scripts_time_their_sides(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    found = run(bf16, tmp_path, "--model", "digits", "--rounds", 2)
    assert sides(found, "bf16") == ["ampctx", "bf16 state", "8bit state", "torch bf16", "torch fp32"]
    assert [found[f"bf16/{who}/bytes"] for who in ("ampctx", "bf16 state", "torch bf16")] == [26, 18, 14]
    found = run(bf16, tmp_path, "--model", "digits", "--ranks", 3, "--rounds", 2)
    assert sides(found, "bf16") == ["ampctx", "torch bf16", "torch fp32"]
    found = run(offload, tmp_path, "--model", "digits", "--rounds", 2)
    assert sides(found, "bf16 gradients") == ["ampctx", "Offloaded", "torch-fused"]
    assert sides(found, "masters") == ["ampctx", "Offloaded", "split"]
    found = run(host, tmp_path, "--tensors", "7,20", "--rounds", 2, "--clip")
    assert sides(found, "20 tensors") == ["ampctx", "torch-fused"]


def test_kernels_stand_beside_a_copy(tmp_path):
    """The table of a GPU's figures has a place for what a CPU lacks."""
    found = run(kernels, tmp_path, "--model", "digits", "--rounds", 2)
    measured = {figure.removesuffix("/of copy") for figure in found if figure.endswith("/of copy")}
    assert {f"{case}/ampctx" for case in ("scale", "l2norm", *kernels.STEPS)} < measured
    file = tmp_path / "figures.csv"
    file.write_text(file.read_text().replace("kernels-cpu", "kernels-cuda"))
    _, _, *rows = report.kernels(report.load(file))
    assert len(rows) == sum(row.endswith("| not measured | not measured | not measured |") for row in rows) > 20


@pytest.mark.full
def test_loop_gives_time_and_memory_of_each_level(tmp_path):
    found = run(loop, tmp_path, "--model", "digits", "--rounds", 2)
    assert sides(found, "ampctx") == list(loop.LEVELS)
    others = [f"{dtype} with torch-fused" for dtype in ("fp32", "autocast fp16", "autocast bf16")]
    assert sides(found, "torch") == others
    for side in (*(f"ampctx/{level}" for level in loop.LEVELS), *(f"torch/{who}" for who in others)):
        assert found[f"{side}/peak memory"] > found[f"{side}/held memory"]
        assert 0 < found[f"{side}/step"] < found[f"{side}/time"]


@pytest.mark.full
def test_resume_compares_a_killed_run_with_the_whole_one(monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    side = "ampctx FusedAdam bf16 split 8bit"
    resume.main(["--only", side, "--steps", "6"])
    assert capsys.readouterr().out.splitlines()[-1] == f"| {side} | bit for bit | bit for bit |"


def test_split_is_exact_on_some_patterns():
    command = [sys.executable, "-W", "error", str(ROOT / "benchmarks" / "split_exact.py"), "4099"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"{-(-(1 << 32) // 4099)} patterns came back")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_suite_has_options_that_its_scripts_take(device, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = list(suite.entries(device))
    assert len({entry.name for entry in found}) == len(found)
    assert {entry.name.split("-")[1] for entry in found} == {device}
    for entry in found:
        parsed = measuring.parse(suite.SCRIPTS[entry.script].parser(), entry.command(tmp_path / "figures.csv", 11)[1:])
        assert (parsed.device, parsed.rounds) == (device, 5 if "tiny20000" in entry.options else 11)
