"""What every benchmark here measures with: a clock, the memory bandwidth, quartiles, and what it ran on."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

import ampctx


class Clock:
    """Marks of time and the milliseconds between two of them: the wall clock, or events on the GPU's stream."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"

    def settle(self) -> None:
        if self.on_gpu:
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


def spread(samples: list[float]) -> dict[str, Any]:
    q1, median, q3 = statistics.quantiles(samples, n=4, method="inclusive")
    return {
        "median": round(median, 4),
        "q1": round(q1, 4),
        "q3": round(q3, 4),
        "samples": [round(s, 4) for s in samples],
    }


def commit() -> str | None:
    """The commit that runs, "-dirty" where files other than results differ from it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).resolve().parents[1]), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--", ".", ":(exclude)benchmarks/results", ":(exclude)benchmarks/README.md")
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
