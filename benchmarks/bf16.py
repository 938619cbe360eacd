"""The step after backward without amp: bf16 weights, a clip and AdamW, as the second diff of README.md has them.

    python benchmarks/bf16.py --model gpt2-small [--ranks 8]

"ampctx" is ``FusedAdam(master_weights="split")`` after ``ampctx.clip_grad_norm_``; "bf16 state" and "8bit state" have a
``state_dtype``, too. The first steps clip nothing, and must lead to the weights of "torch fp32", which has fp32 weights
and gradients. "torch bf16" rounds weights and state. Both are ``AdamW(fused=True)`` after torch's clip.
"bytes" is what a step moves for each parameter: the gradient once, weights and state twice.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from measuring import Bandwidth, Clock, Figures, figures, interleave, options, parse, report
from networks import MODELS
from peers import ATOL, RTOL, STATE_DTYPES, ours, peer
from tail import MAX_NORM, flat, like, part, shard
from torch import Tensor

from ampctx import clip_grad_norm_
from ampctx.kernels.reference_steps import join

NAMED = ("device", "model")


class Side:
    """One optimizer with its parameters; ``step`` clips and steps."""

    def __init__(self, args: argparse.Namespace, dtype: torch.dtype, make: Any, clip: Callable[..., Any]) -> None:
        torch.manual_seed(0)
        model = MODELS[args.model]().to(args.device, torch.bfloat16).to(dtype)
        if args.ranks:
            shard(model, args.ranks)
        self.params, self.clip = list(model.parameters()), clip
        self.grads = [like(p, torch.empty_like(part(p))) for p in self.params]
        self.optimizer = make(self.params)

    def step(self, values: list[Tensor], clock: Clock) -> dict[str, float]:
        for param, grad, value in zip(self.params, self.grads, values, strict=True):
            part(grad).copy_(value)
            param.grad = grad
        clock.settle()
        start = clock.mark()
        self.clip(self.params, MAX_NORM)
        clipped = clock.mark()
        self.optimizer.step()
        end = clock.mark()
        self.optimizer.zero_grad()
        times = {"clip": clock.between(start, clipped), "step": clock.between(clipped, end)}
        return {"time": sum(times.values()), **times}

    def bytes(self) -> float:
        kept = [t for p in self.params for t in self.optimizer.state[p].values() if isinstance(t, Tensor)]
        held = sum(part(t).nbytes for t in (*self.params, *kept) if t.dim() or t.numel() > 1)
        return self.params[0].itemsize + 2 * held / sum(part(p).numel() for p in self.params)


def measure(args: argparse.Namespace) -> Figures:
    bf16, torch_clip = torch.bfloat16, torch.nn.utils.clip_grad_norm_
    split = partial(ours, "FusedAdam", master_weights="split")
    makes = {"ampctx": split}
    if not args.ranks:
        makes |= {f"{name} state": partial(split, state_dtype=dtype) for name, dtype in STATE_DTYPES.items()}
    sides = {who: Side(args, bf16, make, clip_grad_norm_) for who, make in makes.items()}
    for name, dtype in (("bf16", bf16), ("fp32", torch.float32)):
        sides[f"torch {name}"] = Side(args, dtype, peer("FusedAdam", "torch-fused", args.device), torch_clip)
    device, params = torch.device(args.device), sides["ampctx"].params
    torch.manual_seed(1)
    sets = [[torch.randn(part(p).shape, device=device).to(bf16) for p in params] for _ in range(3)]
    clock = Clock(device)
    for side in sides.values():
        for values in sets:
            side.step([value * 2**-17 for value in values], Clock(device, flush=False))
    found = (join(part(p), part(state["remainder"])) for p, state in sides["ampctx"].optimizer.state.items())
    torch.testing.assert_close(flat(found), flat(sides["torch fp32"].params), rtol=RTOL, atol=ATOL)
    bandwidth = Bandwidth(sum(part(p).numel() for p in params), device, clock)
    samples = interleave(sides, lambda who, n: sides[who].step(sets[n % 3], clock), args.rounds, bandwidth)
    return figures("bf16", samples) | {f"bf16/{who}/bytes": [side.bytes()] for who, side in sides.items()}


def parser() -> argparse.ArgumentParser:
    found = options(__file__, __doc__)
    found.add_argument("--model", default="gpt2-small", choices=list(MODELS))
    found.add_argument("--ranks", type=int, default=0, help="of fully_shard; 0, the default: plain tensors")
    return found


def main(arguments: list[str] | None = None) -> None:
    args = parse(options := parser(), arguments)
    report(options, args, measure(args), *NAMED)
    if args.ranks:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
