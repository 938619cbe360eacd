"""The benchmarks run, check what they time, and write what they promise. No time is asserted."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import host
import loop
import measuring
import ops
import peers
import pytest
import shapes
import suite
import tail
import torch
from networks import NETWORKS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def small_passes(monkeypatch):
    """Little memory to walk for bandwidth and caches: these runs are not for their figures."""
    monkeypatch.setattr(measuring, "FLUSH_BYTES", 1024)
    monkeypatch.setattr(measuring, "LEAST_ELEMENTS", 1024)


def run(script, tmp_path, *arguments):
    """The report that a script writes."""
    file = tmp_path / "report.json"
    script.main([*map(str, arguments), "--json", str(file)])
    assert str(tmp_path) not in file.read_text()
    report = json.loads(file.read_text())
    for key in ("command", "machine", "versions", "extension", "commit", "rounds", "device"):
        assert key in report
    return report


def check_spreads(report):
    """Every case has a time for each side, a ratio for each peer, and a bandwidth where it has a floor."""
    for case in report["cases"].values():
        spreads = [side["ms"] for side in case["sides"].values()]
        spreads += [side["over_ampctx"] for who, side in case["sides"].items() if who != "ampctx"]
        if case["floor"]:
            spreads += [case["bandwidth_GB_per_s"]["copy"], case["bandwidth_GB_per_s"]["in place"]]
            assert all(side["share_of_floor"] >= 0 for side in case["sides"].values())
        assert len(spreads) >= 3
        for spread in spreads:
            assert len(spread["samples"]) == report["rounds"]
            assert 0 < spread["q1"] <= spread["median"] <= spread["q3"]


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_tail_writes_figures_of_checked_steps(level, tmp_path, capsys):
    options = ("--model", "digits", "--opt-level", level, "--rounds", 2, "--against", "torch-fused,torch-default")
    report = run(tail, tmp_path, *options)
    check_spreads(report)
    case = report["cases"]["tail"]
    assert (report["device"], report["model"], report["opt_level"]) == ("cpu", "digits", level)
    assert (case["tensors"], case["elements"]) == (8, 6138)
    assert case["check"]["steps_compared"] == 5
    assert case["check"]["overflow_step_changes_nothing"] == (None if level == "O5" else True)
    assert list(case["sides"]) == ["ampctx", "torch-fused", "torch-default"]
    assert "torch-default" in capsys.readouterr().out
    assert report["command"] == (
        f"python benchmarks/tail.py --device cpu --rounds 2 --model digits --opt-level {level} --optimizer FusedAdam "
        "--against torch-fused,torch-default"
    )


@pytest.mark.full(but=2)
@pytest.mark.parametrize("optimizer", peers.OPTIMIZERS)
def test_tail_of_each_optimizer_agrees_with_its_peer(optimizer, tmp_path):
    """With clipping at O2; tail.py compares the weights and fails where they differ."""
    report = run(tail, tmp_path, "--model", "digits", "--optimizer", optimizer, "--clip", "--rounds", 2)
    assert (report["optimizer"], report["clip"]) == (optimizer, True)
    assert " --clip " in report["command"]
    assert report["cases"]["tail"]["check"]["overflow_step_changes_nothing"] is True


def test_tail_fails_where_weights_differ(tmp_path, monkeypatch):
    elsewhere = {"torch-fused": (lambda params: torch.optim.AdamW(params, lr=0.5), "another rate")}
    monkeypatch.setattr(tail, "peers_of", lambda *_: elsewhere)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        run(tail, tmp_path, "--model", "digits", "--rounds", 2)
    assert not (tmp_path / "report.json").exists()


def test_weights_of_8_bit_states_are_not_compared(tmp_path, monkeypatch):
    """A rate that test_tail_fails_where_weights_differ refuses; a step that overflows must still change nothing."""
    elsewhere = {"torchao-8bit": (lambda params: torch.optim.AdamW(params, lr=0.5), "another rate")}
    monkeypatch.setattr(tail, "peers_of", lambda *_: elsewhere)
    check = run(tail, tmp_path, "--model", "digits", "--rounds", 2)["cases"]["tail"]["check"]
    assert check["weights_not_compared"] == ["torchao-8bit"]
    assert check["largest_weight_difference"] is None
    assert check["overflow_step_changes_nothing"] is True
    monkeypatch.setattr(ops, "peers_of", lambda *_: elsewhere)
    report = run(ops, tmp_path, "--model", "digits", "--rounds", 2, "--optimizer", "FusedAdam")
    assert list(report["cases"]["FusedAdam.step"]["sides"]) == ["ampctx", "torchao-8bit", "bf16 state", "8bit state"]


@pytest.mark.filterwarnings("default")  # of the packages' imports
@pytest.mark.parametrize("against", ["optimi", "bitsandbytes", "bitsandbytes-8bit", "torchao-8bit"])
def test_tail_against_packages_that_are_installed(against, tmp_path):
    pytest.importorskip(against.partition("-")[0])
    for level in ("O1", "O2"):
        report = run(tail, tmp_path, "--model", "digits", "--opt-level", level, "--against", against, "--rounds", 2)
        case = report["cases"]["tail"]
        assert list(case["sides"]) == ["ampctx", against]
        assert case["check"]["weights_not_compared"] == ([against] if against in peers.INEXACT else [])


def test_ops_writes_a_case_for_each_op(tmp_path):
    report = run(ops, tmp_path, "--model", "digits", "--rounds", 2, "--optimizer", ",".join(peers.OPTIMIZERS))
    check_spreads(report)
    moved = {
        "unscale": 8, "scale": 8, "axpby": 12, "l2norm": 4, "l2norm fp16": 2, "cast fp16 to fp32": 6,
        "cast fp32 to fp16": 6, "weight casts": 6,
    }  # fmt: skip
    assert list(report["cases"]) == [*moved, *(f"{name}.step" for name in peers.OPTIMIZERS)]
    assert {name: report["cases"][name]["floor"]["bytes"] / 6138 for name in moved} == moved
    assert report["cases"]["unscale"]["sides"]["torch"]["what"] == "torch.amp.GradScaler.unscale_"


def test_host_gives_the_time_of_each_tensor(tmp_path):
    report = run(host, tmp_path, "--tensors", "7,20", "--rounds", 2, "--clip")
    check_spreads(report)
    assert list(report["cases"]) == ["7 tensors", "20 tensors"]
    for count, case in zip((7, 20), report["cases"].values(), strict=True):
        for side in case["sides"].values():
            assert side["us_per_tensor"] == pytest.approx(side["ms"]["median"] * 1e3 / count, rel=1e-2)
        parts = case["sides"]["ampctx"]["parts_ms"]
        assert list(parts) == ["enter", "exit", "clip", "step", "zero_grad"]
        samples = zip(*(part["samples"] for name, part in parts.items() if name != "zero_grad"), strict=True)
        assert [sum(s) for s in samples] == pytest.approx(case["sides"]["ampctx"]["ms"]["samples"], abs=1e-3)
    fewer, more = (case["sides"] for case in report["cases"].values())
    for who in ("ampctx", "torch-fused"):
        further_us = (more[who]["ms"]["median"] - fewer[who]["ms"]["median"]) * 1e3 / 13
        assert more[who]["us_per_further_tensor"] == pytest.approx(further_us, abs=1e-3)
        assert "us_per_further_tensor" not in fewer[who]


def test_host_empties_the_caches_on_request(tmp_path, monkeypatch):
    clocks = []
    monkeypatch.setattr(host, "Clock", lambda *a, **k: clocks.append(measuring.Clock(*a, **k)) or clocks[-1])
    for option in ([], ["--flush"]):
        run(host, tmp_path, "--tensors", "2", "--rounds", 2, *option)
    assert [clock.flush is not None for clock in clocks] == [False, True]


@pytest.mark.full
def test_loop_gives_time_and_memory_of_each_level(tmp_path):
    report = run(loop, tmp_path, "--model", "digits", "--rounds", 2)
    check_spreads(report)
    assert list(report["cases"]) == ["O0", "O1", "O2", "O5", "O5-split"]
    held = {level: case["sides"]["ampctx"]["held_MB"] * 1e6 for level, case in report["cases"].items()}
    norms, weights = 2 * (16 + 32), 6138
    full, small = weights - norms, 2 * (16 + 32) * 4 + 2 * 8 + 8 * 4  # running statistics, counts, steps
    with_masters = full * (2 + 4 + 8) + norms * 12
    # The batch is made before; what a side holds beside weights and states is a few numbers.
    for level, expected in (("O0", weights * 12), ("O1", weights * 12), ("O2", with_masters), ("O5", with_masters)):
        assert expected <= held[level] <= expected + small + 500, level
    expected = full * (2 + 2 + 8) + norms * 12
    assert expected <= held["O5-split"] <= expected + small + 500
    for level, against in (("O0", None), ("O1", "autocast fp16"), ("O2", "autocast fp16"), ("O5", "autocast bf16")):
        sides = report["cases"][level]["sides"]
        names = [*([f"{against}, torch-fused"] if against else []), "fp32, torch-fused"]
        assert list(sides) == ["ampctx", *names]
        assert all(side["peak_MB"] > side["held_MB"] for side in sides.values())
        assert sides["fp32, torch-fused"]["held_MB"] * 1e6 == pytest.approx(held["O0"], abs=500)


def test_memory_counts_what_is_allocated_and_freed():
    kept = []

    def run():
        kept.append(torch.empty(1000, dtype=torch.float64))
        torch.empty(500, dtype=torch.uint8)

    sizes = list(loop.allocations(run))
    assert (sum(sizes), 8000 in sizes, 500 in sizes, -500 in sizes) == (8000, True, True, True)


def test_loop_stops_where_losses_part():
    with pytest.raises(AssertionError, match="leave those of fp32"):
        loop.check_losses([2.0, 1.8], [2.0, 1.0], torch.float16)
    with pytest.raises(AssertionError, match="do not go down"):
        loop.check_losses([2.0, 2.01], [2.0, 2.0], torch.float16)
    assert loop.check_losses([2.0, 1.01], [2.0, 1.0], torch.float16)["largest_loss_difference"] == pytest.approx(0.005)


@pytest.mark.parametrize(
    ("name", "tensors", "elements"),
    [
        ("resnet50", 161, 25_557_032),
        ("bert-large", 398, 336_226_108),
        ("gpt2-xl", 580, 1_557_611_200),
        ("tiny161", 161, 312_622),
        ("tiny5000", 5000, 10_220_200),
        ("tiny20000", 20000, 40_778_497),
    ],
)
def test_tables_have_the_sizes_of_the_models(name, tensors, elements):
    found = shapes.shapes(name)
    assert (len(found), sum(map(math.prod, found))) == (tensors, elements)


@pytest.mark.parametrize("name", ["resnet50", "gpt2-xl", "digits"])
def test_real_models_have_the_parameters_of_their_tables(name):
    with torch.device("meta"):
        assert [tuple(p.shape) for p in NETWORKS[name].make().parameters()] == shapes.shapes(name)


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        (tail, "--rounds 1", "--rounds: 1 is too few"),
        (tail, "--json no/such/folder/tail.json", "--json: there is no directory"),
        (tail, "--model alexnet", "--model: invalid choice: 'alexnet'"),
        (tail, "--against torch-fused,jax", "--against: 'jax' is none of torch-fused, torch-default, apex, te, optimi"),
        (
            tail,
            "--optimizer FusedSGD --against optimi",
            "--against: optimi stands beside FusedAdam alone",
        ),
        (tail, "--against torch-fused,torch-fused", "names one of them twice"),
        (tail, "--against apex", "--against: apex with its compiled amp_C is not installed here"),
        (
            ops,
            "--against te",
            "--against: transformer_engine with its compiled transformer_engine_torch is not installed",
        ),
        (tail, "--optimizer LARC --against torch-default", "--against: torch has no LARC"),
        (ops, "--optimizer FusedAdam,Lion", "--optimizer: 'Lion' is none of FusedAdam"),
        (host, "--tensors 0", "--tensors: 0 tensors are none"),
        (host, "--tensors few", "--tensors: invalid tensor_counts value: 'few'"),
        (loop, "--opt-level O3", "--opt-level: 'O3' is none of O0, O1, O2, O4, O5, O5-split"),
        (loop, "--optimizer LARC", "--opt-level: O5-split is not for LARC"),
    ],
)
def test_bad_arguments_are_refused(script, arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        script.main(arguments.split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_missing_package_is_named_with_its_installation(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "optimi", None)  # which find_spec takes for missing
    with pytest.raises(SystemExit):
        tail.main(["--against", "optimi"])
    message = "--against: torch-optimi is not installed here: pip install --no-deps torch-optimi"
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_missing_gpu_is_named(capsys):
    with pytest.raises(SystemExit):
        tail.main(["--device", "cuda"])
    assert "--device: cuda was asked for and torch finds no CUDA device here" in capsys.readouterr().err


def test_the_command_of_a_report_runs_again(tmp_path, capsys):
    report = run(tail, tmp_path, "--model", "digits", "--rounds", 2, "--clip")
    capsys.readouterr()
    *program, script = report["command"].split()[:2]
    tail.main(report["command"].split()[2:])
    assert (program, script) == (["python"], "benchmarks/tail.py")
    assert capsys.readouterr().out.splitlines()[0] == report["command"]


def test_split_is_exact_on_some_patterns():
    command = [sys.executable, "-W", "error", str(ROOT / "benchmarks" / "split_exact.py"), "--every", "4099"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"{-(-(1 << 32) // 4099)} patterns came back")


# --- the suite --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_suite_has_options_that_its_scripts_take(device, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = list(suite.entries(device))
    assert len({entry.file for entry in found}) == len(found)
    for entry in found:
        script = {"tail": tail, "ops": ops, "host": host, "loop": loop}[entry.script]
        parsed = []
        with monkeypatch.context() as patch:
            patch.setattr(script, "parse", lambda *a, parsed=parsed: parsed.append(measuring.parse(*a)) or sys.exit(0))
            with pytest.raises(SystemExit):
                script.main(entry.command(tmp_path / "report.json", 11)[1:])
        assert (parsed[0].device, parsed[0].rounds) == (device, 5 if "tiny20000" in entry.options else 11)


@pytest.mark.full
def test_the_suite_keeps_the_middle_run(tmp_path, monkeypatch, capfd):
    """Of several runs of a command with a goal, the others running once; what fails is counted and writes nothing."""
    few = [
        suite.Entry("tail-cpu-digits", "tail", ("--model", "digits"), goal=True),
        suite.Entry("tail-cpu-none", "tail", ("--model", "none"), goal=False),
    ]
    monkeypatch.setattr(suite, "entries", lambda device: iter(few))
    # The package of this tree, not another that is installed; one thread, as several wait for each other on busy cores.
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert suite.record("cpu", 2, 2, tmp_path) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["tail-cpu-digits.json"]
    report = json.loads((tmp_path / "tail-cpu-digits.json").read_text())
    case = report["cases"]["tail"]
    assert (report["runs"], len(case["ratios_of_runs"])) == (2, 2)
    assert case["sides"]["torch-fused"]["over_ampctx"]["median"] == min(case["ratios_of_runs"])
    assert "invalid choice: 'none'" in capfd.readouterr().err
