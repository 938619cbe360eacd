"""The step of AdamW in host memory, where ``Offloaded`` makes it, beside those of torch and DeepSpeed.

    OMP_NUM_THREADS=2 python benchmarks/offload.py --threads 2 --against torch-fused,torch-default,deepspeed

Others take no bf16 gradients of fp32 weights, so a cast into memory that is kept is a part of their step. "Offloaded"
has the ways down and up, too: copies within the host's memory here. bf16 weights have fp32 masters, or "split" ones.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from measuring import Bandwidth, Clock, Figures, add_against, options, parse, report
from networks import MODELS
from ops import Inputs, Op, Side, measure
from peers import ATOL, RTOL, ours
from tail import peers_of

# The types of weights and of gradients.
CASES = {
    "fp32": (torch.float32, torch.float32),
    "bf16 gradients": (torch.float32, torch.bfloat16),
    "masters": (torch.bfloat16, torch.bfloat16),
}
NAMED = ("device", "model", "threads")


def side(inputs: Inputs, weights: torch.dtype, grads: torch.dtype, make: Callable[[Any], Any], casts: bool) -> Side:
    params, given = inputs.random(1, weights), inputs.random(0, grads)
    wide = [grad.float() for grad in given] if casts else given
    for param, grad in zip(params, wide, strict=True):
        param.grad_dtype, param.grad = grad.dtype, grad
    optimizer = make(params)

    def run() -> None:
        if casts:
            torch._foreach_copy_(wide, given)
        optimizer.step()

    return Side(run, lambda: [param.float() for param in params])


def step(weights: torch.dtype, grads: torch.dtype, peers: dict[str, Any]) -> Callable[[Inputs], Op]:
    is_wide = weights == torch.float32
    more = {} if is_wide else {"master_weights": True}
    makes = {"ampctx": partial(ours, "FusedAdam", **more), "Offloaded": partial(ours, "Offloaded", **more)}
    makes |= peers if is_wide else {"split": partial(ours, "FusedAdam", master_weights="split")}

    def make(inputs: Inputs) -> Op:
        sides = {who: side(inputs, weights, grads, of, who in peers and grads != weights) for who, of in makes.items()}
        # "split" rounds ties otherwise.
        return Op(24 + grads.itemsize, sides, RTOL, ATOL) if is_wide else Op(28, sides, 2**-7, ATOL)

    return make


def parser() -> argparse.ArgumentParser:
    found = options(__file__, __doc__)
    found.add_argument("--model", default="resnet50", choices=list(MODELS))
    found.add_argument("--threads", type=int, default=1, help="which OMP_NUM_THREADS has set; default 1")
    add_against(found)
    return found


def main(arguments: list[str] | None = None) -> None:
    args = parse(options := parser(), arguments)
    if torch.get_num_threads() != args.threads:  # each library has an OpenMP of its own, which reads it once
        options.error(f"--threads: {args.threads}, and there are {torch.get_num_threads()}. Set OMP_NUM_THREADS.")
    inputs = Inputs(args.model, torch.device("cpu"))
    bandwidth = Bandwidth(inputs.elements, inputs.device, Clock(inputs.device))
    found: Figures = {"model/all/elements": [inputs.elements]}
    for name, dtypes in CASES.items():
        found |= measure(name, step(*dtypes, peers_of(options, "FusedAdam", args)), inputs, bandwidth, args)
    report(options, args, found, *NAMED)


if __name__ == "__main__":
    sys.exit(main())
