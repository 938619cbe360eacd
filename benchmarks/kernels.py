"""The time of each kernel on the device, without the host, beside a copy of as much memory and torch's kernels.

    python benchmarks/kernels.py --device cuda --model bert-large --csv kernels.csv

"of copy" and "of peak" are bytes per second by those of a copy in the same rounds, and by what the card's maker states.
"launches" are those of a call, by torch's profiler, and "captured" is the time of the call in a CUDA graph. No values
are compared: ops.py and the tests do that. On a CPU calls have a time alone.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from measuring import Clock, Figures, figures, interleave, options, parse, report
from networks import MODELS
from ops import Inputs
from peers import LR, ours, peer

from ampctx import ops, optimizers

NAMED = ("device", "model")
CALLS = 5  # between two events
PEAKS = {"A100": 2039, "H100": 3352, "H200": 4800}  # GB/s of the SXM cards
HALF, BF16, SPLIT = torch.float16, torch.bfloat16, {"master_weights": "split"}
# Optimizer, type of weights and gradients, options, bytes moved for each parameter.
STEPS: dict[str, tuple[str, torch.dtype, dict[str, Any], float]] = {
    "adam": ("FusedAdam", torch.float32, {}, 28),
    "adam, fp16 with masters": ("FusedAdam", HALF, {"master_weights": True}, 28),
    "adam, bf16 with masters": ("FusedAdam", BF16, {"master_weights": True}, 28),
    "adam, split": ("FusedAdam", BF16, SPLIT, 26),
    "adam, split, bf16 state": ("FusedAdam", BF16, {**SPLIT, "state_dtype": BF16}, 18),
    "adam, split, 8-bit state": ("FusedAdam", BF16, {**SPLIT, "state_dtype": "8bit"}, 14.25),
    "adam, stochastic": ("FusedAdam", BF16, {"write_back": "stochastic"}, 22),
    "sgd": ("FusedSGD", torch.float32, {}, 20),
    "adagrad": ("FusedAdagrad", torch.float32, {}, 20),
    "lamb": ("FusedLAMB", torch.float32, {}, 44),
}
Calls = dict[str, Callable[[], Any]]


def cases(inputs: Inputs) -> Iterator[tuple[str, float, Calls]]:
    """Name, bytes moved for each element, and the call of each side."""
    wide, half, flag, one = inputs.random(0), inputs.random(0, HALF), inputs.flag, torch.ones((), device=inputs.device)
    unscale, norm = torch._amp_foreach_non_finite_check_and_unscale_, torch.nn.utils.get_total_norm
    scale = ops.multi_tensor_scale
    yield "scale", 8, {"ampctx": lambda: scale(wide, wide, flag, one), "torch": lambda: unscale(wide, flag, one)}
    yield "l2norm", 4, {"ampctx": lambda: ops.multi_tensor_l2norm(wide, flag), "torch": lambda: norm(wide)}
    yield "l2norm fp16", 2, {"ampctx": lambda: ops.multi_tensor_l2norm(half, flag), "torch": lambda: norm(half)}
    yield "unscale, l2norm fp16", 2, {"ampctx": lambda: ops.multi_tensor_unscale_l2norm(half, flag, one, True)}
    for case, (name, dtype, more, moved) in STEPS.items():
        calls = {"ampctx": stepping(inputs, dtype, lambda params, name=name, more=more: ours(name, params, **more))}
        if dtype == torch.float32:
            calls["torch"] = stepping(inputs, dtype, peer(name, "torch-fused", inputs.device.type))
        yield case, moved, calls
    yield "lion", 20, {"ampctx": stepping(inputs, torch.float32, lambda params: optimizers.FusedLion(params, lr=LR))}


def stepping(inputs: Inputs, dtype: torch.dtype, make: Callable[[Any], Any]) -> Callable[[], Any]:
    params = inputs.random(1, dtype)
    for param, grad in zip(params, inputs.random(0, dtype), strict=True):
        param.grad = grad
    optimizer = make(params)
    for group in optimizer.param_groups if type(optimizer).__module__.startswith("torch.") else ():
        group.update({"capturable": True} if "capturable" in group else {})  # torch asks for it in a graph
    return optimizer.step


def device_ms(call: Callable[[], Any], clock: Clock) -> float:
    """Of one call. A GPU spins first while the host makes the calls, for twice as long as these have just taken it."""
    host_s = 0.0
    for _ in range(2):
        clock.settle()
        if clock.on_gpu:
            torch.cuda._sleep(int(host_s * 4e9) + 1)  # cycles, at 2 GHz
        host_s, start = time.perf_counter(), clock.mark()
        for _ in range(CALLS):
            call()
        host_s = time.perf_counter() - host_s
    return clock.between(start, clock.mark()) / CALLS


def of_gpu(call: Callable[[], Any], clock: Clock) -> dict[str, float]:
    """What a GPU alone has: launches, and the time in a graph."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    on_device = [event.name for event in found.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return {"launches": sum("Mem" not in name for name in on_device), "captured": device_ms(graph.replay, clock)}


def measure(name: str, moved: float, calls: Calls, inputs: Inputs, clock: Clock, rounds: int) -> Figures:
    source, target = (torch.ones(inputs.elements, device=inputs.device) for _ in range(2))
    timed = {**calls, "copy": lambda: target.copy_(source)}
    samples = interleave(timed, lambda who, _: {"time": device_ms(timed[who], clock)}, rounds)
    ms = {who: statistics.median(of["time"]) for who, of in samples.items()}
    card = torch.cuda.get_device_name() if clock.on_gpu else ""
    found = figures(name, samples)
    for who, call in calls.items():
        found[f"{name}/{who}/of copy"] = [moved / ms[who] * ms["copy"] / 8]
        for gb_s in (gb_s for part, gb_s in PEAKS.items() if part in card):
            found[f"{name}/{who}/of peak"] = [moved * inputs.elements / ms[who] / 1e6 / gb_s]
        found |= {f"{name}/{who}/{key}": [of] for key, of in (of_gpu(call, clock) if clock.on_gpu else {}).items()}
    return found


def parser() -> argparse.ArgumentParser:
    found = options(__file__, __doc__)
    found.add_argument("--model", default="resnet50", choices=list(MODELS))
    return found


def main(arguments: list[str] | None = None) -> None:
    args = parse(options := parser(), arguments)
    inputs = Inputs(args.model, torch.device(args.device))
    clock, found, failed = Clock(inputs.device, flush=False), Figures(), []
    for name, moved, calls in cases(inputs):
        try:
            found |= measure(name, moved, calls, inputs, clock, args.rounds)
        except RuntimeError as error:  # the figures of the other cases are worth having
            failed.append(f"{name}: {error}")
    report(options, args, found, *NAMED)
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    sys.exit(main())
