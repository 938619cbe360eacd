"""Whole iterations of a real model, forward to cleared gradients: time and peak memory at each opt level.

    python benchmarks/loop.py --model gpt-small --opt-level O0,O1,O2,O5,O5-split --csv loop.csv

Beside fp32, and torch's autocast with the dtype of the level, in fp16 with ``torch.amp.GradScaler``. O5 has fp32
masters beside the model's bf16 weights; O5-split, ``FusedAdam(master_weights="split")``, keeps the 16 bits they lack;
O5-split-bf16 and O5-split-8bit keep the optimizer's state in that ``state_dtype``, too.
"step" is the part of the time that follows backward. All sides start from the same weights and see the same batch, and
their losses must stay together.

Memory is that of tensors: model, optimizer, activations, gradients, temporaries, over the first iterations, in a pass
of its own. On a GPU it is what torch's allocator reports, on the CPU the running sum of the allocations and frees that
torch's profiler records. "peak memory" is the highest during an iteration, "held memory" what stays between two.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measuring import Bandwidth, Clock, Figures, add_against, add_several, interleave, options, parse, report
from networks import NETWORKS
from peers import STATE_DTYPES, Make, ours
from tail import peers_of
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from ampctx.amp import AmpSession

NAMED = ("device", "model")
# The dtype of torch's autocast that stands against each level.
LEVELS = {
    "O0": None,
    "O1": torch.float16,
    "O2": torch.float16,
    **dict.fromkeys(("O4", "O5", "O5-split", "O5-split-bf16", "O5-split-8bit"), torch.bfloat16),
}
ITERATIONS_FOR_MEMORY = 3
# How far a loss may lie from that of fp32, in parts of the first loss. O0 computes the same in another order.
LOSS_TOLERANCE = {None: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.05}
Mark = Callable[[], Any]  # of the clock, at the end of backward


class Workload:
    """A model's starting weights and its batch, on a device."""

    def __init__(self, name: str, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device, self._make = device, NETWORKS[name].make
        self._weights = self._make().state_dict()
        self.inputs, self.targets = (t.to(device) for t in NETWORKS[name].batch())

    def model(self) -> torch.nn.Module:
        with self.device:
            model = self._make()
        model.load_state_dict(self._weights)
        return model

    def loss(self, model: torch.nn.Module) -> Tensor:
        return F.cross_entropy(model(self.inputs).float(), self.targets)


class AmpctxLoop:
    def __init__(self, work: Workload, level: str) -> None:
        self.work = work
        self.model = work.model()
        opt_level, *more = level.split("-")
        self.options = {"opt_level": opt_level, "verbosity": 0}
        kept: dict[str, Any] = {}
        if more:
            self.options["master_weights"], kept["master_weights"] = False, "split"
        if more[1:]:
            kept["state_dtype"] = STATE_DTYPES[more[1]]
        self.optimizer = ours("FusedAdam", self.model.parameters(), **kept)
        self.state: dict[str, Any] | None = None
        self.session: AmpSession | None = None

    def start(self) -> None:
        """The casts of O1 and O4 would reach the forward of other sides: a session with them leaves after each turn."""
        if self.session is None:
            self.session = AmpSession()
            self.session.initialize(self.model, self.optimizer, **self.options)
            if self.state:
                self.session.load_state_dict(self.state)

    def iterate(self, mark: Mark = time.perf_counter) -> Tensor:
        loss = self.work.loss(self.model)
        with self.session.scale_loss(loss, self.optimizer) as scaled:
            scaled.backward()
            self.after_backward = mark()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def stop(self, for_good: bool = False) -> None:
        if self.session and (for_good or self.options["opt_level"] in ("O1", "O4")):
            self.state = self.session.state_dict()
            self.session.reset()
            self.session = None


class TorchLoop:
    def __init__(self, work: Workload, dtype: torch.dtype | None, make: Make) -> None:
        self.work = work
        self.model = work.model()
        self.optimizer = make(self.model.parameters())
        kind = work.device.type
        self.scaler = torch.amp.GradScaler(kind, enabled=dtype == torch.float16)
        self.autocast = lambda: torch.autocast(kind, dtype) if dtype else contextlib.nullcontext()

    def start(self) -> None:
        pass

    def iterate(self, mark: Mark = time.perf_counter) -> Tensor:
        with self.autocast():
            loss = self.work.loss(self.model)
        self.scaler.scale(loss).backward()
        self.after_backward = mark()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss

    def stop(self, for_good: bool = False) -> None:
        pass


Side = AmpctxLoop | TorchLoop


# --- memory -----------------------------------------------------------------------------------------------------------


def allocations(run: Callable[[], None]) -> Iterator[int]:
    """Bytes of each allocation of CPU memory for tensors during ``run``, below 0 of each free, in order."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        found.export_chrome_trace(str(trace))
        events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["name"] == "[memory]"]
    return (e["args"]["Bytes"] for e in sorted(events, key=lambda e: e["ts"]) if e["args"]["Device Type"] == 0)


def memory(make: Callable[[], Side], device: torch.device) -> dict[str, float]:
    """Megabytes (10^6 bytes) at the highest point and between iterations, of a side and all that it makes."""
    gc.collect()
    sides: list[Side] = []

    def build() -> None:
        sides.append(make())
        sides[0].start()

    def iterate() -> None:
        for _ in range(ITERATIONS_FOR_MEMORY):
            sides[0].iterate()

    if device.type == "cuda":
        before = torch.cuda.memory_allocated()
        build()
        torch.cuda.reset_peak_memory_stats()
        iterate()
        peak, held = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
    else:
        peak = held = sum(allocations(build))
        for size in allocations(iterate):
            held += size
            peak = max(peak, held)
    sides.pop().stop(for_good=True)
    gc.collect()
    return {"peak memory": peak / 1e6, "held memory": held / 1e6}


# --- the comparison ---------------------------------------------------------------------------------------------------


def dtype_name(dtype: torch.dtype | None) -> str:
    return {None: "fp32", torch.float16: "autocast fp16", torch.bfloat16: "autocast bf16"}[dtype]


def measure(work: Workload, args: argparse.Namespace, peers: dict[str, Make]) -> Figures:
    """Cases: "ampctx" with a side for each level, "torch" with one for each other loop, and each level with its ratios
    to torch's loops in its dtype and in fp32."""
    makes: dict[str, Callable[[], Side]] = {
        level: lambda level=level: AmpctxLoop(work, level) for level in args.opt_level
    }
    for against, make in peers.items():
        for dtype in dict.fromkeys([None, *(LEVELS[level] for level in args.opt_level)]):
            makes[f"{dtype_name(dtype)} with {against}"] = lambda d=dtype, make=make: TorchLoop(work, d, make)
    megabytes = {who: memory(make, work.device) for who, make in makes.items()}

    clock = Clock(work.device)
    sides = {who: make() for who, make in makes.items()}
    losses: dict[str, list[float]] = {who: [] for who in sides}

    def iterate(who: str, _: int) -> dict[str, float]:
        sides[who].start()
        losses[who].append(sides[who].iterate().item())  # in the state that a loop is in
        clock.settle()
        start = clock.mark()
        loss = sides[who].iterate(clock.mark)
        end = clock.mark()
        losses[who].append(loss.item())
        sides[who].stop()
        return {"time": clock.between(start, end), "step": clock.between(sides[who].after_backward, end)}

    samples = interleave(sides, iterate, args.rounds, Bandwidth(0, work.device, clock))
    for side in sides.values():
        side.stop(for_good=True)
    first = next(iter(peers))
    found: Figures = {"model/all/elements": [sum(p.numel() for p in work.model().parameters())]}
    for who in sides:
        case = "ampctx" if who in LEVELS else "torch"
        found |= {f"{case}/{who}/{quantity}": of for quantity, of in samples[who].items()}
        found |= {f"{case}/{who}/{quantity}": [of] for quantity, of in megabytes[who].items()}
    for level in args.opt_level:
        check_losses(losses[level], losses[f"fp32 with {first}"], LEVELS[level])
        for who in dict.fromkeys([*(f"{dtype_name(LEVELS[level])} with {p}" for p in peers), f"fp32 with {first}"]):
            pairs = zip(samples[who]["time"], samples[level]["time"], strict=True)
            found[f"{level}/{who}/ratio"] = [theirs / ours for theirs, ours in pairs]
    return found | {f"memory/{passed}/bandwidth": of for passed, of in samples["bandwidth"].items()}


def check_losses(found: list[float], fp32: list[float], dtype: torch.dtype | None) -> None:
    """AssertionError where half of the losses leave fp32's by more than the tolerance, or training gained nothing. A
    skipped step shifts a curve, which shows where it is steep."""
    apart = statistics.median(abs(a - b) for a, b in zip(found, fp32, strict=True)) / fp32[0]
    told = ", ".join(f"{a:.3g} ({b:.3g})" for a, b in zip(found, fp32, strict=True))
    assert apart <= LOSS_TOLERANCE[dtype], (
        f"beside {dtype_name(dtype)}, losses leave those of fp32 (in brackets): {told}"
    )
    assert found[-1] < found[0], f"the losses {found} do not go down"


def parser() -> argparse.ArgumentParser:
    found = options(__file__, __doc__)
    found.add_argument("--model", default="gpt-small", choices=list(NETWORKS))
    add_several(found, "--opt-level", tuple(LEVELS), tuple(LEVELS))
    add_against(found)
    return found


def main(arguments: list[str] | None = None) -> None:
    args = parse(options := parser(), arguments)
    work = Workload(args.model, torch.device(args.device))
    report(options, args, measure(work, args, peers_of(options, "FusedAdam", args)), *NAMED)


if __name__ == "__main__":
    sys.exit(main())
