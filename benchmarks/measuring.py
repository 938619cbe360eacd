"""What every benchmark here shares: options, clock, memory bandwidth, interleaved rounds, and the CSV of figures.

A figure is "report/case/side/quantity", such as "tail-cpu-resnet50-O2-FusedAdam/tail/torch-fused/ratio", with samples
of all rounds. The CSV holds their medians. "ratio" is the side's time by that of ampctx in the same round: above 1,
ampctx is faster.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import random
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "benchmarks" / "results" / "figures.csv"
WRITTEN = ("benchmarks/results", "docs/_static/gains.png")  # by `make bench`
WARMUP_ROUNDS = 3
AGAINST = ("torch-fused", "torch-default", "optimi", "bitsandbytes", "bitsandbytes-8bit", "torchao-8bit", "deepspeed")
UNITS = {
    **dict.fromkeys(("time", "enter", "exit", "clip", "step", "zero_grad"), "ms"),
    "captured": "ms",
    "bytes": "B",
    **dict.fromkeys(("peak memory", "held memory"), "MB"),
    "bandwidth": "GB/s",
}  # of quantities; others have none

Samples = dict[str, dict[str, list[float]]]
Figures = dict[str, list[float]]


# --- options ----------------------------------------------------------------------------------------------------------


def some_of(choices: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """The type of an option that takes one or several of ``choices``, with commas between them."""

    def parse(text: str) -> tuple[str, ...]:
        found = tuple(text.split(","))
        for word in found:
            if word not in choices:
                raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(choices)}")
        return tuple(dict.fromkeys(found))

    return parse


def options(script: str, doc: str) -> argparse.ArgumentParser:
    """A parser with the options that every script has; each adds those of its own."""
    parser = argparse.ArgumentParser(
        prog=f"python benchmarks/{Path(script).name}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=11, help="at least 2; default 11")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="put the figures there, in place of earlier ones")
    return parser


def add_several(parser: argparse.ArgumentParser, flag: str, choices: Iterable[str], default: tuple[str, ...]) -> None:
    """An option that takes one or several of ``choices``."""
    text = f"one or several of {', '.join(choices)}, with commas between; default {','.join(default)}"
    parser.add_argument(flag, type=some_of(choices), default=default, metavar="NAME,...", help=text)


def add_against(parser: argparse.ArgumentParser) -> None:
    add_several(parser, "--against", AGAINST, ("torch-fused",))


def parse(parser: argparse.ArgumentParser, arguments: list[str] | None) -> argparse.Namespace:
    """The checked options; ends the program with what is wrong about one, and nothing run."""
    args = parser.parse_args(arguments)
    if args.rounds < 2:
        parser.error(f"--rounds: {args.rounds} is too few for quartiles, 2 is the least")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: cuda was asked for and torch finds no CUDA device here")
    if args.csv and not args.csv.parent.is_dir():
        parser.error(f"--csv: there is no directory {args.csv.parent}")
    return args


def command(parser: argparse.ArgumentParser, args: argparse.Namespace) -> str:
    """What to type for the same run, defaults left out."""
    words = [parser.prog]
    for name, value in vars(args).items():
        if name != "csv" and value != parser.get_default(name):
            words.append(f"--{name.replace('_', '-')}")
            if value is not True:
                words.append(",".join(map(str, value)) if isinstance(value, tuple) else str(value))
    return " ".join(words)


def report_name(parser: argparse.ArgumentParser, args: argparse.Namespace, *always: str) -> str:
    """The script, the options ``always``, and others as far as they are set; not how long and against whom."""
    words = [Path(parser.prog).stem]
    for name, value in vars(args).items():
        if name in always or (
            value != parser.get_default(name) and name not in ("rounds", "csv", "against", "device", "tensors")
        ):
            words.append(name if value is True else ",".join(value) if isinstance(value, tuple) else str(value))
    return "-".join(words)


# --- time and memory traffic ------------------------------------------------------------------------------------------


FLUSH_BYTES = 128 * 2**20  # more than the last cache of the machines at hand
LEAST_ELEMENTS = 16 * 2**20  # likewise, 64 MB of fp32


class Clock:
    """Marks of time and the milliseconds between two of them: events on the GPU's stream, or a clock of the host. On a
    CPU with one thread that is the thread's own time, which leaves out the time slices of other programs.

    ``host``: the wall clock on a GPU too, and the host's caches: the time that Python takes. ``flush=False`` leaves
    the caches as they are.
    """

    def __init__(self, device: torch.device, host: bool = False, flush: bool = True) -> None:
        self.synchronizes = device.type == "cuda"
        self.on_gpu = self.synchronizes and not host
        is_alone = device.type == "cpu" and torch.get_num_threads() == 1
        self.now = time.thread_time if is_alone else time.perf_counter
        self.flush = torch.ones(FLUSH_BYTES // 4, device="cpu" if host else device) if flush else None

    def settle(self) -> None:
        """Before a start: nothing of use in the caches and nothing to write back, nothing left to do on the GPU."""
        if self.flush is not None:
            self.flush.sum()
        if self.synchronizes:
            torch.cuda.synchronize()

    def mark(self) -> Any:
        if not self.on_gpu:
            return self.now()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, end: Any) -> float:
        if not self.on_gpu:
            return (end - start) * 1e3
        end.synchronize()
        return start.elapsed_time(end)


class Bandwidth:
    """GB/s of one pass over fp32 memory, bytes read and bytes written both counted.

    A CPU reads a cache line before it writes to it, which a copy pays for and a pass in place does not; most of a tail
    is in place. So both are measured, and a floor is taken at the best figure seen.
    """

    def __init__(self, elements: int, device: torch.device, clock: Clock) -> None:
        elements = max(LEAST_ELEMENTS, elements)
        self.src, self.dst = torch.ones(elements, device=device), torch.zeros(elements, device=device)
        self.clock = clock

    def measure(self) -> dict[str, float]:
        passes = {"copy": lambda: self.dst.copy_(self.src), "in place": lambda: self.dst.mul_(0.5)}
        found = {}
        for name, run in passes.items():
            self.clock.settle()
            start = self.clock.mark()
            run()
            found[name] = 2 * self.src.nbytes / self.clock.between(start, self.clock.mark()) / 1e6
        return found


# --- rounds -----------------------------------------------------------------------------------------------------------


def interleave(
    sides: Iterable[str],
    measure: Callable[[str, int], dict[str, float]],
    rounds: int,
    bandwidth: Bandwidth | None = None,
) -> Samples:
    """Measures every side once per round, in random order, by its name and the number of the round; below 0 it warms
    up. And "bandwidth", if given.

    That gives measured values by name; ``samples[side][name]`` has one for each round.
    """
    order = random.Random(0)
    samples: Samples = {who: {} for who in (*sides, *(["bandwidth"] if bandwidth else []))}
    for number in range(-WARMUP_ROUNDS, rounds):
        for who in order.sample(list(samples), len(samples)):
            found = bandwidth.measure() if bandwidth and who == "bandwidth" else measure(who, number)
            for name, value in found.items():
                if number >= 0:
                    samples[who].setdefault(name, []).append(value)
    return samples


def figures(case: str, samples: Samples, floor_bytes: int | None = None) -> Figures:
    """The figures of one thing that ampctx and others did.

    ``samples`` as ``interleave`` gives them: "time" for ampctx and each other side, for ampctx parts of it as well, and
    "copy" and "in place" for "bandwidth". "of bound" is the share of its time that ampctx would take if it moved no
    more than ``floor_bytes``, at the best bandwidth seen.
    """
    found: Figures = {}
    bandwidth = samples.get("bandwidth", {})
    for who, values in samples.items():
        if who != "bandwidth":
            shown = values if who == "ampctx" else {"time": values["time"]}
            found |= {f"{case}/{who}/{quantity}": of for quantity, of in shown.items()}
        if who not in ("bandwidth", "ampctx"):
            pairs = zip(values["time"], samples["ampctx"]["time"], strict=True)
            found[f"{case}/{who}/ratio"] = [theirs / ours for theirs, ours in pairs]
    if floor_bytes:
        floor_ms = floor_bytes / max(bandwidth["copy"] + bandwidth["in place"]) / 1e6
        found[f"{case}/ampctx/of bound"] = [floor_ms / statistics.median(samples["ampctx"]["time"])]
    return found | {f"memory/{passed}/bandwidth": of for passed, of in bandwidth.items()}


# --- the CSV ----------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    figure: str
    value: str
    unit: str
    machine: str
    commit: str
    command: str


def read(file: Path = FIGURES) -> dict[str, Row]:
    """The rows of a CSV by figure."""
    with file.open(newline="") as lines:
        return {row["figure"]: Row(**row) for row in csv.DictReader(lines)}


def write(file: Path, rows: Sequence[Row]) -> None:
    """Puts the rows of a report in the place of all that the CSV has of it."""
    before = list(read(file).values()) if file.exists() else []
    reports = {row.figure.partition("/")[0] for row in rows}
    kept = [row for row in before if row.figure.partition("/")[0] not in reports]
    with file.open("w", newline="") as lines:
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerow(Row._fields)
        writer.writerows(sorted([*kept, *rows], key=lambda row: row.figure.partition("/")[0]))


def shown(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else f"{value:.5g}"


def rows(report: str, found: Mapping[str, float], device: str, command: str) -> list[Row]:
    about = machine(device), commit(), command
    return [Row(f"{report}/{key}", shown(v), UNITS.get(key.rpartition("/")[2], ""), *about) for key, v in found.items()]


def commit() -> str:
    """The commit that runs, "-dirty" where files other than results differ from it; empty without git."""
    if not shutil.which("git"):
        return ""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--", ".", *(f":(exclude){path}" for path in WRITTEN))
    return git("rev-parse", "HEAD")[:12] + ("-dirty" if changed else "")


def machine(device: str) -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    where = [torch.cuda.get_device_name()] if device == "cuda" else [*models, platform.machine()][:1]
    threads = torch.get_num_threads()
    where += [f"{os.cpu_count()} cores", f"{threads} thread{'s' * (threads > 1)}"]
    return ", ".join([*where, f"torch {torch.__version__}", f"Python {platform.python_version()}"])


def report(parser: argparse.ArgumentParser, args: argparse.Namespace, found: Figures, *always: str) -> None:
    """Prints the figures of a run, and puts their medians where ``--csv`` says. ``always`` as in report_name."""
    print(f"{command(parser, args)}\n{machine(args.device)}, load {os.getloadavg()[0]:.2f}, {args.rounds} rounds")
    for figure, samples in found.items():
        case, who, quantity = figure.split("/")
        quartiles = statistics.quantiles(samples * 2, n=4, method="inclusive")
        unit = UNITS.get(quantity, "")
        print(
            f"{case:20} {who:34} {quantity:18} {quartiles[1]:10.4g} {unit:4} ({quartiles[0]:.4g} to {quartiles[2]:.4g})"
        )
    if args.csv:
        medians = {figure: statistics.median(samples) for figure, samples in found.items()}
        write(args.csv, rows(report_name(parser, args, *always), medians, args.device, command(parser, args)))
