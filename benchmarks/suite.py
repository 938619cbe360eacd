"""What `make bench` records: every comparison of benchmarks/README.md.

    python benchmarks/suite.py [--device cpu|cuda] [--runs 3] [--rounds 11] [--output benchmarks/results/figures.csv]

The commands that the goals of benchmarks/GOALS.md are read from run ``--runs`` times, the whole list through before it
starts again; each figure is the median of the runs.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import bf16
import host
import kernels
import loop
import offload
import ops
import start
import tail
from measuring import FIGURES, ROOT, Row, read, report_name, shown, write
from peers import OPTIMIZERS

SCRIPTS = {module.__name__: module for module in (bf16, host, kernels, loop, offload, ops, start, tail)}
# The packages that `make bench` installs.
PEERS = ("optimi", "bitsandbytes", "bitsandbytes-8bit", "torchao-8bit")


def peers(device: str) -> list[str]:
    """On a GPU those that are there: `make gpu-check` installs nothing."""
    return [name for name in PEERS if device == "cpu" or importlib.util.find_spec(name.split("-")[0])]


@dataclass(frozen=True)
class Entry:
    """``goal``: whether a goal is read from it."""

    script: str
    options: tuple[str, ...]
    goal: bool = False

    @property
    def name(self) -> str:
        """Of the report that it writes."""
        parser = SCRIPTS[self.script].parser()
        return report_name(parser, parser.parse_args(self.options), *SCRIPTS[self.script].NAMED)

    def command(self, output: Path, rounds: int) -> list[str]:
        if "tiny20000" in self.options:  # seconds a round
            rounds = min(rounds, 5)
        return [f"benchmarks/{self.script}.py", *self.options, "--rounds", str(rounds), "--csv", str(output)]


def entries(device: str) -> Iterator[Entry]:
    def tails(model: str, level: str, optimizer: str, clip: bool, goal: bool, *against: str) -> Entry:
        found = ("--device", device, "--model", model, "--opt-level", level, "--optimizer", optimizer)
        more = ("--against", ",".join(("torch-fused", *against))) if against else ()
        return Entry("tail", (*found, *(["--clip"] if clip else []), *more), goal)

    # torchao compiles its step for each shape.
    quick = [name for name in peers(device) if name != "torchao-8bit"]
    for model in ("resnet50", "tiny5000") if device == "cpu" else ("resnet50", "bert-large", "tiny5000"):
        yield Entry("ops", ("--device", device, "--model", model), goal=True)
        if device == "cuda":
            yield Entry("kernels", ("--device", device, "--model", model))
        yield tails(model, "O1", "FusedAdam", False, True, "torch-default")
        yield tails(model, "O1", "FusedAdam", True, True)
        yield tails(model, "O2", "FusedAdam", False, True)
        yield tails(model, "O2", "FusedAdam", True, True)
        yield tails(model, "O5", "FusedAdam", False, False, *(quick if model == "resnet50" else ()))
        yield tails(model, "O5", "FusedAdam", True, False)
    for model in ("tiny161", "tiny1000", "tiny20000") if device == "cpu" else ():
        for level, clip in itertools.product(("O1", "O2"), (False, True)):
            yield tails(model, level, "FusedAdam", clip, False)
    for model in ("gpt2-small", "efficientnet-b7", "lora") if device == "cpu" else ():
        for level, clip in itertools.product(("O1", "O2"), (False, True)):
            yield tails(model, level, "FusedAdam", clip, True)
    for model in ("tiny161", "tiny1000"):  # of fully_shard
        found = tails(model, "O1", "FusedAdam", True, False)
        yield Entry("tail", (*found.options, "--ranks", "8"))
    for model, *ranks in (("gpt2-small",), ("tiny161", "--ranks", "8"), ("tiny1000", "--ranks", "8")):
        yield Entry("bf16", ("--device", device, "--model", model, *ranks))
    for optimizer in OPTIMIZERS:
        if optimizer != "FusedAdam":
            yield tails("resnet50", "O2", optimizer, True, False)
    for level, clip in itertools.product(("O1", "O2"), ((), ("--clip",)) if device == "cpu" else ((),)):
        yield Entry("host", ("--device", device, "--opt-level", level, *clip), goal=True)
    if device == "cpu":
        yield Entry("host", ("--opt-level", "O1", "--tensors", "161,5000", "--flush"))
        yield Entry("start", ())
        known = "torch-fused,torch-default" + ",deepspeed" * bool(importlib.util.find_spec("deepspeed"))
        yield from (Entry("offload", ("--threads", n, "--against", known)) for n in ("1", "2"))
    model = "gpt-small" if device == "cpu" else "resnet50"
    against = ",".join(("torch-fused", *peers(device)))
    yield Entry("loop", ("--device", device, "--model", model, "--against", against), goal=True)


def record(device: str, runs: int, rounds: int, output: Path) -> int:
    """The number of commands that failed."""
    found: dict[Entry, list[dict[str, Row]]] = {}
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.csv"
        for run, entry in itertools.product(range(runs), list(entries(device))):
            if run and not entry.goal:
                continue
            file.unlink(missing_ok=True)
            start = time.monotonic()
            environment = {**os.environ, "OMP_NUM_THREADS": entry.options[1] if "--threads" in entry.options else "1"}
            done = subprocess.run([sys.executable, *entry.command(file, rounds)], cwd=ROOT, env=environment)
            print(f"({entry.name}, run {run + 1}: {time.monotonic() - start:.0f} s)\n", flush=True)
            if done.returncode:
                failed += 1
                continue
            of_runs = found.setdefault(entry, [])
            of_runs.append(read(file))
            medians = {key: statistics.median_low(float(rows[key].value) for rows in of_runs) for key in of_runs[0]}
            write(output, [row._replace(value=shown(medians[key])) for key, row in of_runs[0].items()])
    return failed


def main() -> str | None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--runs", type=int, default=3, choices=range(1, 10), help="of what has a goal; default 3")
    parser.add_argument("--rounds", type=int, default=11, help="of each run; default 11")
    parser.add_argument("--output", type=Path, default=FIGURES, metavar="FILE.csv")
    args = parser.parse_args()
    failed = record(args.device, args.runs, args.rounds, args.output)
    return f"{failed} of the commands failed, see above" if failed else None


if __name__ == "__main__":
    sys.exit(main())
