"""What `make bench` records: every comparison of benchmarks/README.md, one JSON each.

    python benchmarks/suite.py [--device cpu|cuda] [--runs 3] [--rounds 11] [--output benchmarks/results]

The commands that the goals of benchmarks/GOALS.md are read from run ``--runs`` times, the whole list through before it
starts again; of each case the run with the median ratio is kept, and the ratios of all runs with it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from measuring import ROOT, middle_run
from peers import OPTIMIZERS


@dataclass(frozen=True)
class Entry:
    """``file``: the name of the JSON, without its ending; ``goal``: whether a goal is read from it."""

    file: str
    script: str
    options: tuple[str, ...]
    goal: bool

    def command(self, output: Path, rounds: int) -> list[str]:
        if "tiny20000" in self.options:  # seconds a round
            rounds = min(rounds, 5)
        return [f"benchmarks/{self.script}.py", *self.options, "--rounds", str(rounds), "--json", str(output)]


# The packages that `make bench` installs.
PEERS = ("optimi", "bitsandbytes", "bitsandbytes-8bit", "torchao-8bit")


def _tail(device: str, model: str, level: str, optimizer: str, clip: bool, goal: bool, *more: str) -> Entry:
    file = f"tail-{device}-{model}-{level}-{optimizer}{'-clip' if clip else ''}"
    options = ("--device", device, "--model", model, "--opt-level", level, "--optimizer", optimizer)
    return Entry(file, "tail", (*options, *(["--clip"] if clip else []), *more), goal)


def entries(device: str) -> Iterator[Entry]:
    for model in ("resnet50", "tiny5000") if device == "cpu" else ("resnet50", "bert-large", "tiny5000"):
        yield Entry(f"ops-{device}-{model}", "ops", ("--device", device, "--model", model), True)
        yield _tail(device, model, "O1", "FusedAdam", False, True, "--against", "torch-fused,torch-default")
        yield _tail(device, model, "O1", "FusedAdam", True, True)
        yield _tail(device, model, "O2", "FusedAdam", False, True)
        yield _tail(device, model, "O2", "FusedAdam", True, True)
        # torchao compiles its step for each shape.
        others = ",".join(("torch-fused", *PEERS[:-1])) if model == "resnet50" else "torch-fused"
        yield _tail(device, model, "O5", "FusedAdam", False, False, "--against", others)
        yield _tail(device, model, "O5", "FusedAdam", True, False)
    for model in ("tiny161", "tiny1000", "tiny20000") if device == "cpu" else ():
        for level, clip in itertools.product(("O1", "O2"), (False, True)):
            yield _tail(device, model, level, "FusedAdam", clip, True)
    for optimizer in OPTIMIZERS:
        if optimizer != "FusedAdam":
            yield _tail(device, "resnet50", "O2", optimizer, True, False)
    for level in ("O1", "O2"):
        yield Entry(f"host-{device}-{level}", "host", ("--device", device, "--opt-level", level), level == "O1")
    if device == "cpu":
        cold = ("--opt-level", "O1", "--tensors", "161,5000", "--flush")
        yield Entry("host-cpu-O1-flush", "host", ("--device", "cpu", *cold), True)
    model = "gpt-small" if device == "cpu" else "resnet50"
    against = ("--against", ",".join(("torch-fused", *PEERS)))
    yield Entry(f"loop-{device}-{model}", "loop", ("--device", device, "--model", model, *against), False)


def record(device: str, runs: int, rounds: int, output: Path) -> int:
    """The number of commands that failed."""
    todo, found, failed = list(entries(device)), {}, 0
    with tempfile.TemporaryDirectory() as folder:
        for run in range(runs):
            for entry in todo:
                if run and not entry.goal:
                    continue
                file, start = Path(folder) / "report.json", time.monotonic()
                done = subprocess.run([sys.executable, *entry.command(file, rounds)], cwd=ROOT)
                print(f"({entry.file}, run {run + 1}: {time.monotonic() - start:.0f} s)\n", flush=True)
                if done.returncode:
                    failed += 1
                    continue
                found.setdefault(entry, []).append(json.loads(file.read_text()))
    for entry, reports in found.items():
        (output / f"{entry.file}.json").write_text(json.dumps(middle_run(reports), indent=1) + "\n")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--runs", type=int, default=3, help="of what has a goal; default 3")
    parser.add_argument("--rounds", type=int, default=11, help="of each run; default 11")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results", metavar="FOLDER")
    args = parser.parse_args()
    if args.runs < 1:
        parser.error(f"--runs: {args.runs} is none")
    if not args.output.is_dir():
        parser.error(f"--output: there is no directory {args.output}")
    failed = record(args.device, args.runs, args.rounds, args.output)
    if failed:
        print(f"{failed} of the commands failed, see above", file=sys.stderr)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
