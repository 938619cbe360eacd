"""What every benchmark here shares: options, clock, memory bandwidth, interleaved rounds, quartiles, report and table.

A report is one JSON: command, machine, versions, commit, and ``cases``. A case is one thing that several sides did, in
the same rounds: ``{"floor": ..., "sides": {"ampctx": {"ms": spread}, "torch-fused": {"ms": spread, "over_ampctx":
spread}}}``, where a spread has the samples, their median and quartiles, and ``over_ampctx`` is the side's time by that
of ampctx in the same round: above 1, ampctx is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

import ampctx

ROOT = Path(__file__).resolve().parents[1]
# What `make bench` writes.
WRITTEN = (
    "benchmarks/results",
    "benchmarks/GOALS.md",
    "docs/benchmarks.md",
    "docs/performance.md",
    "docs/_static/gains.png",
)
WARMUP_ROUNDS = 3
# Figures of a side that some scripts add.
EXTRAS = ("us_per_tensor", "us_per_further_tensor", "peak_MB", "held_MB")
AGAINST = ("torch-fused", "torch-default", "apex", "te", "optimi", "bitsandbytes", "bitsandbytes-8bit", "torchao-8bit")

Samples = dict[str, dict[str, list[float]]]


# --- options ----------------------------------------------------------------------------------------------------------


def some_of(choices: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """The type of an option that takes one or several of ``choices``, with commas between them."""

    def parse(text: str) -> tuple[str, ...]:
        found = tuple(text.split(","))
        for word in found:
            if word not in choices:
                raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(choices)}")
        if len(set(found)) < len(found):
            raise argparse.ArgumentTypeError(f"{text!r} names one of them twice")
        return found

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
    parser.add_argument("--json", type=Path, metavar="FILE", help="write figures, machine and versions there")
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
    if args.json and not args.json.parent.is_dir():
        parser.error(f"--json: there is no directory {args.json.parent}")
    return args


def command(parser: argparse.ArgumentParser, args: argparse.Namespace) -> str:
    """What to type for the same run, all defaults spelled out."""
    words = [parser.prog]
    for name, value in vars(args).items():
        if name != "json" and value is not False:
            shown = (
                "" if value is True else " " + (",".join(map(str, value)) if isinstance(value, tuple) else str(value))
            )
            words.append(f"--{name.replace('_', '-')}{shown}")
    return " ".join(words)


# --- time and memory traffic ------------------------------------------------------------------------------------------


FLUSH_BYTES = 128 * 2**20  # more than the last cache of the machines at hand
LEAST_ELEMENTS = 16 * 2**20  # likewise, 64 MB of fp32


class Clock:
    """Marks of time and the milliseconds between two of them: the wall clock, or events on the GPU's stream.

    ``host``: the wall clock on a GPU too, and the host's caches: the time that Python takes. ``flush=False`` leaves
    the caches as they are.
    """

    def __init__(self, device: torch.device, host: bool = False, flush: bool = True) -> None:
        self.synchronizes = device.type == "cuda"
        self.on_gpu = self.synchronizes and not host
        self.flush = torch.ones(FLUSH_BYTES // 4, device="cpu" if host else device) if flush else None

    def settle(self) -> None:
        """Before a start: nothing of use in the caches and nothing to write back, nothing left to do on the GPU."""
        if self.flush is not None:
            self.flush.sum()
        if self.synchronizes:
            torch.cuda.synchronize()

    def mark(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
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

    def measure(self, round_number: int) -> dict[str, float]:
        passes = {"copy": lambda: self.dst.copy_(self.src), "in place": lambda: self.dst.mul_(0.5)}
        found = {}
        for name, run in passes.items():
            self.clock.settle()
            start = self.clock.mark()
            run()
            found[name] = 2 * self.src.nbytes / self.clock.between(start, self.clock.mark()) / 1e6
        return found


# --- rounds -----------------------------------------------------------------------------------------------------------


def interleave(contenders: Mapping[str, Callable[[int], dict[str, float]]], rounds: int) -> Samples:
    """Calls every contender once per round, in random order, with the number of the round; below 0 it warms up.

    A contender gives its measured values by name; ``samples[contender][name]`` has one for each round.
    """
    order = random.Random(0)
    samples: Samples = {who: {} for who in contenders}
    for number in range(-WARMUP_ROUNDS, rounds):
        for who in order.sample(list(contenders), len(contenders)):
            found = contenders[who](number)
            for name, value in found.items():
                if number >= 0:
                    samples[who].setdefault(name, []).append(value)
    return samples


def spread(samples: list[float]) -> dict[str, Any]:
    q1, median, q3 = statistics.quantiles(samples, n=4, method="inclusive")
    return {
        "median": round(median, 4),
        "q1": round(q1, 4),
        "q3": round(q3, 4),
        "samples": [round(s, 4) for s in samples],
    }


def case(samples: Samples, what: Mapping[str, str], floor_bytes: int | None = None, **about: Any) -> dict[str, Any]:
    """What a report says of one thing that ampctx and others did.

    ``samples`` as ``interleave`` gives them: "ms" for ampctx and each other side, more names for parts of it, and
    "copy" and "in place" for "bandwidth". ``what`` says what a side was, ``about`` goes into the case as it is.
    """
    found: dict[str, Any] = {**about, "floor": None}
    bandwidth = samples.get("bandwidth")
    if bandwidth:
        found["bandwidth_GB_per_s"] = {name: spread(values) for name, values in bandwidth.items()}
    floor_ms = None
    if bandwidth and floor_bytes:
        floor_ms = floor_bytes / max(bandwidth["copy"] + bandwidth["in place"]) / 1e6
        found["floor"] = {"bytes": floor_bytes, "ms": round(floor_ms, 4)}
    found["sides"] = sides = {}
    for who, values in samples.items():
        if who == "bandwidth":
            continue
        side = sides[who] = {"what": what[who], "ms": spread(values["ms"])}
        if who != "ampctx":
            ratios = [t / a for t, a in zip(values["ms"], samples["ampctx"]["ms"], strict=True)]
            side["over_ampctx"] = spread(ratios)
        if floor_ms is not None:
            side["share_of_floor"] = round(floor_ms / statistics.median(values["ms"]), 4)
        parts = {name: spread(of_part) for name, of_part in values.items() if name != "ms"}
        if parts:
            side["parts_ms"] = parts
    return found


# --- reports ----------------------------------------------------------------------------------------------------------


def commit() -> str | None:
    """The commit that runs, "-dirty" where files other than results differ from it."""

    if not shutil.which("git"):
        return None

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--", ".", *(f":(exclude){path}" for path in WRITTEN))
    return git("rev-parse", "HEAD") + ("-dirty" if changed else "") or None


def environment(device: str) -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    extension = ampctx.ops.extension
    return {
        "machine": {
            "cpu": cpu,
            "cores": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "load_before": round(os.getloadavg()[0], 2),
            "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        },
        "versions": {
            "ampctx": ampctx.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "cuda": torch.version.cuda,
        },
        "extension": {"loaded": extension.loaded, "backends": list(extension.backends), **extension.build},
        "commit": commit(),
    }


def report(
    parser: argparse.ArgumentParser, args: argparse.Namespace, cases: dict[str, Any], **more: Any
) -> dict[str, Any]:
    """The report of a run; printed as a table, and written where ``--json`` says."""
    taken = {name: value for name, value in vars(args).items() if name not in ("json", "rounds")}
    found = {
        "benchmark": Path(parser.prog).stem,
        "command": command(parser, args),
        **taken,
        **environment(args.device),
        "rounds": args.rounds,
        **more,
        "cases": cases,
    }
    print(table(found))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return found


def middle_run(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """One report of several of the same command: each case as the run had it whose ratio to the first peer is the
    median one, with the ratios of all runs beside it."""

    def ratio(of_case: dict[str, Any]) -> float:
        return next(side["over_ampctx"]["median"] for side in of_case["sides"].values() if "over_ampctx" in side)

    joined = dict(reports[0], runs=len(reports), cases={})
    for name in reports[0]["cases"]:
        runs = [r["cases"][name] for r in reports]
        ratios = [ratio(run) for run in runs]
        joined["cases"][name] = {**runs[ratios.index(statistics.median_low(ratios))], "ratios_of_runs": ratios}
    return joined


def table(found: dict[str, Any]) -> str:
    lines = [found["command"], f"{found['machine']['gpu'] or found['machine']['cpu']}, {found['rounds']} rounds"]
    for name, one in found["cases"].items():
        size = f": {one['tensors']} tensors, {one['elements']:,} elements" if "tensors" in one else ""
        floor = f", bytes floor {one['floor']['ms']:.3f} ms" if one["floor"] else ""
        lines += ["", f"{name}{size}{floor}"]
        lines.append(f"  {'':26}{'ms':>9} {'quartiles':>19} {'/ ampctx':>9} {'quartiles':>15} {'of floor':>9}")
        for who, side in one["sides"].items():
            row = f"  {who:26}{_figures(side['ms'], 9, 3)}"
            row += _figures(side["over_ampctx"], 10, 2) if "over_ampctx" in side else " " * 26
            row += f"{side['share_of_floor']:10.0%}" if "share_of_floor" in side else ""
            row += "".join(f"  {key} {side[key]}" for key in EXTRAS if key in side)
            lines.append(row)
            lines += [f"    {part:24}{_figures(of_part, 9, 3)}" for part, of_part in side.get("parts_ms", {}).items()]
        for pass_name, gb_per_s in one.get("bandwidth_GB_per_s", {}).items():
            lines.append(f"  {'memory, ' + pass_name + ', GB/s':26}{_figures(gb_per_s, 9, 1)}")
    return "\n".join(lines)


def _figures(of: dict[str, Any], width: int, digits: int) -> str:
    middle = width + (11 if width < 10 else 6)
    return f"{of['median']:{width}.{digits}f}" + f"{of['q1']:.{digits}f} to {of['q3']:.{digits}f}".rjust(middle)
