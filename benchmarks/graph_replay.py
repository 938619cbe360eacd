"""A whole training iteration in a CUDA graph, replayed with overflows, beside the same iterations run eagerly.

    python benchmarks/gpu_check.py replay --device cuda|cpu --iterations 1000 [--json FILE]

The graph holds forward, ``scale_loss``, backward, clipping, the step and the update of the loss scale, at O2 with
FusedAdam. Some inputs hold an inf, which is written into the graph's input. Skipped steps and loss scale must be those
of the rule, and weights and state finite and equal bit for bit to those of the eager run. On the CPU, which has no
graphs, both runs are eager.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from ampctx import clip_grad_norm_
from ampctx.amp import AmpSession
from ampctx.optimizers import FusedAdam

WARMUP = 3  # iterations before the capture, which make the state
OVERFLOW_EVERY = 97
# The scale grows by 2 after 2,000 clean updates: this many were counted before the run, so that it sees that.
CLEAN_BEFORE, GROWTH_INTERVAL = 1990, 2000


def overflows(i: int) -> bool:
    return i % OVERFLOW_EVERY == OVERFLOW_EVERY - 1


def rule(iterations: int) -> tuple[int, float]:
    """How many steps are skipped, and the loss scale after them."""
    scale, clean, skipped = 2.0**16, CLEAN_BEFORE, 0
    for i in range(iterations):
        if overflows(i):
            scale, clean, skipped = scale / 2, 0, skipped + 1
        else:
            clean += 1
            if clean == GROWTH_INTERVAL:
                scale, clean = scale * 2, 0
    return skipped, scale


class Loop:
    """A model, its optimizer, and the inputs of all iterations; ``input`` is the tensor that a graph reads."""

    def __init__(self, device: torch.device, iterations: int) -> None:
        torch.manual_seed(0)
        self.device = device
        model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 8))
        self.model = model.to(device)
        self.optimizer = FusedAdam(model.parameters(), lr=1e-3, capturable=True)
        self.session = AmpSession()
        self.session.initialize(self.model, self.optimizer, opt_level="O2", verbosity=0)
        state = self.session.state_dict(masters=True)
        state["loss_scaler0"]["unskipped"] = CLEAN_BEFORE
        self.session.load_state_dict(state)
        self.inputs = torch.randn(iterations, 16, 32, device=device)
        self.inputs[OVERFLOW_EVERY - 1 :: OVERFLOW_EVERY, 0, 0] = float("inf")
        self.input = torch.zeros_like(self.inputs[0])

    def iterate(self) -> None:
        loss = self.model(self.input).float().square().mean()
        with self.session.scale_loss(loss, self.optimizer) as scaled:
            scaled.backward()
        clip_grad_norm_(self.session.master_params(self.optimizer), 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def run(self, first: int, last: int, iteration: Callable[[], None]) -> float:
        """Seconds of the iterations from ``first`` to before ``last``."""
        self.wait()
        start = time.monotonic()
        for i in range(first, last):
            self.input.copy_(self.inputs[i])
            iteration()
        self.wait()
        return time.monotonic() - start

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def capture(self) -> Callable[[], None]:
        """Runs the warm-up, and gives what replays the iteration after it."""
        if self.device.type != "cuda":
            self.run(0, WARMUP, self.iterate)
            return self.iterate
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.run(0, WARMUP, self.iterate)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.iterate()
        return graph.replay

    def result(self) -> list[Tensor]:
        """Weights, masters and state."""
        state = [v for s in self.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
        masters = [p for group in self.optimizer.param_groups for p in group["params"]]
        return [t.detach() for t in (*self.model.parameters(), *masters, *state)]


def check(eager: Loop, replayed: Loop, iterations: int) -> dict[str, float]:
    """AssertionError where the loops part, or break the rule; else skipped steps and loss scale."""
    wanted = rule(iterations)
    for name, loop in (("eager", eager), ("replayed", replayed)):
        scale = loop.session.state_dict()["loss_scaler0"]["loss_scale"]
        found = loop.session.skipped_steps(loop.optimizer), scale
        assert found == wanted, f"{name}: skipped steps and loss scale are {found}, the rule gives {wanted}"
    pairs = list(zip(eager.result(), replayed.result(), strict=True))
    broken = [i for i, pair in enumerate(pairs) for t in pair if not torch.isfinite(t).all()]
    assert not broken, f"weights and state are not finite: tensors {broken} of {len(pairs)}"
    unlike = [(i, a.double() - b.double()) for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)]
    apart = {i: difference.abs().max().item() for i, difference in unlike}
    assert not apart, f"eager and replayed results differ: largest difference of each tensor {apart}"
    return {"skipped_steps": wanted[0], "loss_scale": wanted[1], "tensors_compared": len(pairs)}


def measure(device: torch.device, iterations: int) -> dict[str, float]:
    total = WARMUP + iterations
    eager, replayed = Loop(device, total), Loop(device, total)
    eager.run(0, WARMUP, eager.iterate)
    eager_seconds = eager.run(WARMUP, total, eager.iterate)
    start = time.monotonic()
    replay = replayed.capture()
    capture_seconds = time.monotonic() - start
    replay_seconds = replayed.run(WARMUP, total, replay)
    found = check(eager, replayed, total)
    for loop in (eager, replayed):
        loop.session.reset()
    return {
        "iterations": iterations,
        **found,
        "capture_seconds": round(capture_seconds, 2),
        "eager_ms_per_iteration": round(eager_seconds / iterations * 1e3, 4),
        "replay_ms_per_iteration": round(replay_seconds / iterations * 1e3, 4),
    }


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/gpu_check.py replay",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--iterations", type=int, default=1000, help="at least 1; default 1000")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write counts and times there")
    args = parser.parse_args(arguments)
    if args.iterations < 1:
        parser.error(f"--iterations: {args.iterations} are none")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: cuda was asked for and torch finds no CUDA device here")
    # cuBLAS repeats a result on another stream with a workspace of one size alone.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    found = measure(torch.device(args.device), args.iterations)
    print(", ".join(f"{name} {value}" for name, value in found.items()), flush=True)
    if args.json:
        args.json.write_text(json.dumps(found) + "\n")
