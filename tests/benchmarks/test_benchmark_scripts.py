"""The benchmarks run, check what they time, and write what they promise. No time is asserted."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import host
import loop
import measuring
import networks
import ops
import peers
import pytest
import resume
import start
import suite
import tail
import torch

ROOT = Path(__file__).resolve().parents[2]
FIGURES = measuring.figures


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
def test_tail_writes_figures_of_checked_steps(level, tmp_path, capsys):
    options = ("--model", "digits", "--opt-level", level, "--rounds", 2, "--against", "torch-fused,torch-default")
    assert list(run(tail, tmp_path, *options)) == [
        "tail/ampctx/time",
        "tail/ampctx/exit",
        "tail/torch-fused/time",
        "tail/torch-fused/ratio",
        "tail/torch-default/time",
        "tail/torch-default/ratio",
        "tail/ampctx/of bound",
        "memory/copy/bandwidth",
        "memory/in place/bandwidth",
    ]
    assert "torch-default" in capsys.readouterr().out
    (found,) = {row._replace(figure="", value="", unit="") for row in measuring.read(tmp_path / "figures.csv").values()}
    level = "" if level == "O2" else f" --opt-level {level}"
    assert found.command == (
        f"python benchmarks/tail.py --rounds 2 --model digits{level} --against torch-fused,torch-default"
    )
    assert f"torch {torch.__version__}" in found.machine


@pytest.mark.full(but=2)
@pytest.mark.parametrize("optimizer", peers.OPTIMIZERS)
def test_tail_of_each_optimizer_agrees_with_its_peer(optimizer, tmp_path):
    """With clipping at O2; tail.py compares the weights and fails where they differ."""
    run(tail, tmp_path, "--model", "digits", "--optimizer", optimizer, "--clip", "--rounds", 2)
    (report,) = {figure.partition("/")[0] for figure in measuring.read(tmp_path / "figures.csv")}
    assert report == f"tail-cpu-digits-O2-{optimizer}-clip"


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


@pytest.mark.parametrize("side", ["ours", "theirs"])
def test_tail_fails_where_an_overflow_moves_a_weight(side, tmp_path, monkeypatch):
    def moves(call):
        def step(self, grads, clock):
            found = call(self, grads, clock)
            if not all(g.isfinite().all() for g in grads):
                self.weights[0].data.add_(1)
            return found

        return step

    kind = tail.AmpctxTail if side == "ours" else tail.TorchTail
    monkeypatch.setattr(kind, "step", moves(kind.step))
    with pytest.raises(AssertionError, match="an overflow moved a weight"):
        run(tail, tmp_path, "--model", "digits", "--rounds", 2)


def test_weights_of_8_bit_states_are_not_compared(tmp_path, monkeypatch):
    """A rate that test_tail_fails_where_weights_differ refuses."""
    elsewhere = {"torchao-8bit": lambda params: torch.optim.AdamW(params, lr=0.5)}
    monkeypatch.setattr(tail, "peers_of", lambda *_: elsewhere)
    assert sides(run(tail, tmp_path, "--model", "digits", "--rounds", 2), "tail") == ["ampctx", "torchao-8bit"]
    monkeypatch.setattr(ops, "peers_of", lambda *_: elsewhere)
    found = run(ops, tmp_path, "--model", "digits", "--rounds", 2, "--optimizer", "FusedAdam")
    assert sides(found, "FusedAdam.step") == ["ampctx", "torchao-8bit", "bf16 state", "8bit state"]


@pytest.mark.filterwarnings("default")  # of the packages' imports
@pytest.mark.parametrize("against", ["optimi", "bitsandbytes", "bitsandbytes-8bit", "torchao-8bit"])
def test_tail_against_packages_that_are_installed(against, tmp_path):
    pytest.importorskip(against.partition("-")[0])
    for level in ("O1", "O2"):
        found = run(tail, tmp_path, "--model", "digits", "--opt-level", level, "--against", against, "--rounds", 2)
        assert sides(found, "tail") == ["ampctx", against]


def test_ops_writes_a_case_for_each_op(tmp_path, monkeypatch):
    floors = {}
    monkeypatch.setattr(ops, "figures", lambda case, samples, n: floors.update({case: n}) or FIGURES(case, samples, n))
    found = run(ops, tmp_path, "--model", "digits", "--rounds", 2, "--optimizer", ",".join(peers.OPTIMIZERS))
    moved = {
        "unscale": 8, "scale": 8, "axpby": 12, "l2norm": 4, "l2norm fp16": 2, "cast fp16 to fp32": 6,
        "cast fp32 to fp16": 6, "weight casts": 6,
    }  # fmt: skip
    assert list(floors) == [*moved, *(f"{name}.step" for name in peers.OPTIMIZERS)]
    assert {name: floors[name] / 6138 for name in moved} == moved
    assert found["model/all/elements"] == 6138
    assert sides(found, "unscale") == ["ampctx", "torch.amp.GradScaler.unscale_"]
    assert all("ampctx" in sides(found, case) and len(sides(found, case)) > 1 for case in floors)


def test_host_gives_the_time_of_each_tensor(tmp_path):
    found = run(host, tmp_path, "--tensors", "7,20", "--rounds", 2, "--clip")
    parts = ["enter", "exit", "clip", "step", "zero_grad"]
    for n in (7, 20):
        ours = [figure.split("/")[2] for figure in found if figure.startswith(f"{n} tensors/ampctx/")]
        assert ours[: 1 + len(parts)] == ["time", *parts]
        # Two rounds: the median is the mean.
        assert sum(found[f"{n} tensors/ampctx/{part}"] for part in parts[:-1]) == pytest.approx(
            found[f"{n} tensors/ampctx/time"], rel=1e-2
        )
    for who in ("ampctx", "torch-fused"):
        further_us = (found[f"20 tensors/{who}/time"] - found[f"7 tensors/{who}/time"]) * 1e3 / 13
        assert found[f"20 tensors/{who}/per further tensor"] == pytest.approx(further_us, rel=1e-2, abs=1e-2)
        assert f"7 tensors/{who}/per further tensor" not in found


def test_host_empties_the_caches_on_request(tmp_path, monkeypatch):
    clocks = []
    monkeypatch.setattr(host, "Clock", lambda *a, **k: clocks.append(measuring.Clock(*a, **k)) or clocks[-1])
    for option in ([], ["--flush"]):
        run(host, tmp_path, "--tensors", "2", "--rounds", 2, *option)
    assert [clock.flush is not None for clock in clocks] == [False, True]


@pytest.mark.full
def test_loop_gives_time_and_memory_of_each_level(tmp_path):
    found = run(loop, tmp_path, "--model", "digits", "--rounds", 2)
    assert sides(found, "ampctx") == list(loop.LEVELS)
    others = [f"{dtype} with torch-fused" for dtype in ("fp32", "autocast fp16", "autocast bf16")]
    assert sides(found, "torch") == others
    norms, weights = 2 * (16 + 32), 6138
    full, small = weights - norms, 2 * (16 + 32) * 4 + 2 * 8 + 8 * 4  # running statistics, counts, steps
    with_masters, split = full * (2 + 4 + 8) + norms * 12, full * (2 + 2 + 8) + norms * 12
    expected = {**dict.fromkeys(("O0", "O1", "O4"), weights * 12), "O2": with_masters, "O5": with_masters}
    # The batch is made before; what a side holds beside weights and states is a few numbers.
    for level, least in {**expected, "O5-split": split}.items():
        assert least <= found[f"ampctx/{level}/held memory"] * 1e6 <= least + small + 500, level
    for side in (*(f"ampctx/{level}" for level in loop.LEVELS), *(f"torch/{who}" for who in others)):
        assert found[f"{side}/peak memory"] > found[f"{side}/held memory"]
        assert 0 < found[f"{side}/step"] < found[f"{side}/time"]
    fp32 = found["torch/fp32 with torch-fused/held memory"]
    assert fp32 * 1e6 == pytest.approx(found["ampctx/O0/held memory"] * 1e6, abs=500)
    for level, against in (("O1", others[1]), ("O5", others[2]), ("O0", others[0]), ("O2", others[0])):
        assert f"{level}/{against}/ratio" in found


@pytest.mark.full
def test_start_times_an_import_and_a_build(tmp_path):
    assert sides(run(start, tmp_path, "--rounds", 2), "import") == ["ampctx"]


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
    loop.check_losses([2.0, 1.01], [2.0, 1.0], torch.float16)


@pytest.mark.parametrize(
    ("name", "tensors", "elements"),
    [
        ("resnet50", 161, 25_557_032),
        ("bert-large", 398, 336_226_108),
        ("gpt2-xl", 580, 1_557_611_200),
        ("gpt2-small", 148, 124_439_808),
        ("efficientnet-b7", 711, 66_347_960),
        ("lora", 1100, 1100 * 4096),
        ("tiny161", 161, 312_622),
        pytest.param("tiny20000", 20000, 40_778_497, marks=pytest.mark.full),
    ],
)
def test_models_have_their_sizes(name, tensors, elements):
    found = networks.shapes(name)
    assert (len(found), sum(map(math.prod, found))) == (tensors, elements)


@pytest.mark.full
def test_resume_compares_a_killed_run_with_the_whole_one(monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    side = "ampctx FusedAdam bf16 split 8bit"
    resume.main(["--only", side, "--steps", "6"])
    assert capsys.readouterr().out.splitlines()[-1] == f"| {side} | bit for bit | bit for bit |"


def test_split_is_exact_on_some_patterns():
    command = [sys.executable, "-W", "error", str(ROOT / "benchmarks" / "split_exact.py"), "--every", "4099"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"{-(-(1 << 32) // 4099)} patterns came back")


# --- the suite --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_suite_has_options_that_its_scripts_take(device, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = list(suite.entries(device))
    assert len({entry.name for entry in found}) == len(found)
    assert {entry.name.split("-")[1] for entry in found} == {device}
    for entry in found:
        parsed = measuring.parse(suite.SCRIPTS[entry.script].parser(), entry.command(tmp_path / "figures.csv", 11)[1:])
        assert (parsed.device, parsed.rounds) == (device, 5 if "tiny20000" in entry.options else 11)


@pytest.mark.full
def test_the_suite_keeps_medians_of_its_runs(tmp_path, monkeypatch, capfd):
    """Of several runs of a command with a goal, the others running once; what fails is counted and writes nothing."""
    few = [suite.Entry("tail", ("--model", "digits"), goal=True), suite.Entry("tail", ("--against", "apex"))]
    monkeypatch.setattr(suite, "entries", lambda device: iter(few))
    read, runs = measuring.read, []
    monkeypatch.setattr(suite, "read", lambda file: runs.append(read(file)) or runs[-1])
    # The package of this tree, not another that is installed; one thread, as several wait for each other on busy cores.
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert suite.record("cpu", 2, 2, tmp_path / "figures.csv") == 1
    ratio = "tail-cpu-digits-O2-FusedAdam/tail/torch-fused/ratio"
    written = measuring.read(tmp_path / "figures.csv")
    assert len(runs) == 2
    assert float(written[ratio].value) == min(float(run[ratio].value) for run in runs)
    assert {figure.partition("/")[0] for figure in written} == {ratio.partition("/")[0]}
    assert "apex with its compiled amp_C is not installed" in capfd.readouterr().err
