"""The tail of a training step, from the end of backward to the weights being ready: ampctx beside torch's own.

    python benchmarks/tail.py --device cpu --model resnet50 --opt-level O2 --optimizer FusedAdam --clip --json tail.json

Timed for ampctx: the exit of ``amp.scale_loss``, with ``--clip`` ``ampctx.clip_grad_norm_`` over the master parameters,
and the step. Timed for torch, doing the same work with the optimizer that peers.py names:

* O1: ``torch.amp.GradScaler`` and the optimizer on fp32 parameters;
* O2: the same on fp32 masters, between a copy of the fp16 gradients into theirs and one of the masters into the model;
* O5: the two copies and the bf16 model without a scaler, as O5 does not scale.

Clipping, torch calls ``unscale_`` and ``torch.nn.utils.clip_grad_norm_``; otherwise its fused optimizers unscale while
they step, the fastest way torch has. Both sides run in one process on the same gradients, round by round in random
order, and must end with the same weights.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from measuring import Bandwidth, Clock, environment, spread
from peers import OPTIMIZERS
from shapes import MODELS, Parameters
from torch import Tensor

from ampctx import amp, clip_grad_norm_

LOW_PRECISION = {"O1": None, "O2": torch.float16, "O5": torch.bfloat16}
WARMUP_ROUNDS = 3
MAX_NORM = 1.0
# The same formula in fp32, in another order of operations and with sums in another order, a few steps on.
RTOL, ATOL = 1e-4, 2e-6


class AmpctxTail:
    """Model and optimizer after ``amp.initialize``; ``step`` is a user's loop without forward and backward."""

    def __init__(self, model: torch.nn.Module, opt_level: str, optimizer: str, clip: bool) -> None:
        self.params = list(model.parameters())
        self.clip = clip
        optimizer = OPTIMIZERS[optimizer][0](model.parameters())
        _, self.optimizer = amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)

    @property
    def weights(self) -> list[Tensor]:
        return list(amp.master_params(self.optimizer))

    @property
    def scale(self) -> float:
        return amp.state_dict()["loss_scaler0"]["loss_scale"]

    def step(self, grads: list[Tensor], clock: Clock) -> dict[str, float]:
        with amp.scale_loss(torch.ones((), device=self.params[0].device), self.optimizer):
            for param, grad in zip(self.params, grads, strict=True):
                param.grad = grad
            clock.settle()
            start = clock.mark()
        unscaled = clock.mark()
        if self.clip:
            clip_grad_norm_(amp.master_params(self.optimizer), MAX_NORM)
        self.optimizer.step()
        end = clock.mark()
        times = {"total": clock.between(start, end), "scale_loss exit": clock.between(start, unscaled)}
        self.optimizer.zero_grad()
        return times


class TorchTail:
    """The same with torch alone: ``GradScaler``, the optimizer, and for a 16-bit model fp32 masters kept by hand."""

    def __init__(self, model: torch.nn.Module, opt_level: str, optimizer: str, clip: bool) -> None:
        self.clip = clip
        device = next(model.parameters()).device
        dtype = LOW_PRECISION[opt_level]
        norms = (module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d))
        kept = {p for norm in norms for p in norm.parameters()}
        self.weights = [p.detach() for p in model.parameters()]
        self.params = [
            p.detach().to(dtype) if dtype and p not in kept else w
            for p, w in zip(model.parameters(), self.weights, strict=True)
        ]
        self.optimizer = OPTIMIZERS[optimizer][1](self.weights)
        self.scaler = torch.amp.GradScaler(device.type, enabled=opt_level != "O5")
        self.copied = [i for i, (p, w) in enumerate(zip(self.params, self.weights, strict=True)) if p is not w]
        self.master_grads = [torch.empty_like(self.weights[i]) for i in self.copied]

    @property
    def scale(self) -> float:
        return self.scaler.get_scale()

    def step(self, grads: list[Tensor], clock: Clock) -> dict[str, float]:
        self.scaler.scale(torch.ones((), device=self.params[0].device))
        for weight, grad in zip(self.weights, grads, strict=True):
            weight.grad = grad if grad.dtype == weight.dtype else None
        half_grads, half_params = [grads[i] for i in self.copied], [self.params[i] for i in self.copied]
        masters = [self.weights[i] for i in self.copied]
        clock.settle()
        start = clock.mark()
        if self.copied:
            # No public call of torch copies a list at once; tensor by tensor its GPU side would be slower.
            torch._foreach_copy_(self.master_grads, half_grads)
            for master, grad in zip(masters, self.master_grads, strict=True):
                master.grad = grad
        if self.clip:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.weights, MAX_NORM)
        self.scaler.step(self.optimizer)
        if self.copied:
            torch._foreach_copy_(half_params, masters)
        self.scaler.update()
        end = clock.mark()
        times = {"total": clock.between(start, end)}
        self.optimizer.zero_grad()
        return times


# fp32 numbers of state that an optimizer reads and writes for each weight.
STATES = {"FusedSGD": 1, "FusedAdagrad": 1, "FusedNovoGrad": 1, "LARC": 1}


def floor_bytes(params: list[Tensor], optimizer: str) -> int:
    """What a tail has to move at the least: the finite check sees all gradients before the first weight moves.

    Check, which gives the norm for clipping too: read the gradient. Step: read it again, read and write the fp32 weight
    and the state, write the model's 16-bit weight where there is one.
    """
    of_step = 8 + 8 * STATES.get(optimizer, 2)
    return sum(
        p.numel() * (2 * p.element_size() + of_step + (p.element_size() if p.dtype != torch.float32 else 0))
        for p in params
    )


def gradients(params: list[Tensor], seed: int) -> list[Tensor]:
    """Scaled gradients as backward would leave them, in the dtype of each parameter."""
    torch.manual_seed(seed)
    return [torch.randn(p.shape, device=p.device).to(p.dtype) for p in params]


def check_same_weights(ours: AmpctxTail, theirs: TorchTail) -> float:
    """The largest difference between the two sides' fp32 weights; AssertionError beyond RTOL, ATOL."""
    largest = 0.0
    for mine, other in zip(ours.weights, theirs.weights, strict=True):
        torch.testing.assert_close(mine.detach(), other, rtol=RTOL, atol=ATOL)
        largest = max(largest, (mine.detach() - other).abs().max().item())
    for param, master in zip(ours.params, ours.weights, strict=True):
        assert torch.equal(param.detach(), master.detach().to(param.dtype)), "a model weight is not its rounded master"
    return largest


def check_overflow_skips(side: AmpctxTail | TorchTail, grads: list[Tensor], clock: Clock) -> None:
    before, scale = [w.detach().clone() for w in side.weights], side.scale
    bad = [g.clone() for g in grads]
    bad[-1].view(-1)[-1] = float("inf")
    side.step(bad, clock)
    assert side.scale == scale / 2, f"the scale after an overflow is {side.scale}, before it was {scale}"
    assert all(torch.equal(w.detach(), b) for w, b in zip(side.weights, before, strict=True)), (
        "an overflow moved a weight"
    )


def measure(args: argparse.Namespace) -> dict[str, Any]:
    device, clock = torch.device(args.device), Clock(torch.device(args.device))
    torch.manual_seed(0)
    model = Parameters(args.model).to(device)
    theirs = TorchTail(Parameters(args.model).to(device), args.opt_level, args.optimizer, args.clip)
    with torch.no_grad():
        for copy, weight, param in zip(theirs.params, theirs.weights, model.parameters(), strict=True):
            weight.copy_(param)
            copy.copy_(param)
    ours = AmpctxTail(model, args.opt_level, args.optimizer, args.clip)
    bandwidth = Bandwidth(max(16 * 2**20, sum(w.numel() for w in theirs.weights)), device, clock)
    sets = [gradients(ours.params, seed) for seed in range(3)]
    samples: dict[str, list[float]] = {"ampctx": [], "scale_loss exit": [], "torch": [], "copy": [], "in place": []}
    order = random.Random(0)

    for round_number in range(-WARMUP_ROUNDS, args.rounds):
        found: dict[str, float] = {}
        for who in order.sample(("ampctx", "torch", "bandwidth"), 3):
            if who == "bandwidth":
                found.update(bandwidth.measure())
                continue
            # Fresh copies: both sides may unscale in place.
            grads = [g.clone() for g in sets[round_number % len(sets)]]
            times = (ours if who == "ampctx" else theirs).step(grads, clock)
            found[who] = times.pop("total")
            found.update(times)
        if round_number >= 0:
            for name, value in found.items():
                samples[name].append(value)

    difference = check_same_weights(ours, theirs)
    if args.opt_level != "O5":
        check_overflow_skips(ours, sets[0], clock)
        check_overflow_skips(theirs, sets[0], clock)
    floor = floor_bytes(ours.params, args.optimizer)
    floor_ms = floor / max(samples["copy"] + samples["in place"]) / 1e6
    ratios = [t / a for t, a in zip(samples["torch"], samples["ampctx"], strict=True)]
    return {
        "tensors": len(ours.params),
        "elements": sum(p.numel() for p in ours.params),
        "rounds": args.rounds,
        "ampctx_ms": spread(samples["ampctx"]),
        "ampctx_scale_loss_exit_ms": spread(samples["scale_loss exit"]),
        "torch_ms": spread(samples["torch"]),
        "torch_over_ampctx": spread(ratios),
        "copy_GB_per_s": spread(samples["copy"]),
        "in_place_GB_per_s": spread(samples["in place"]),
        "floor": {
            "bytes": floor,
            "ms": round(floor_ms, 4),
            "ampctx_share": round(floor_ms / statistics.median(samples["ampctx"]), 4),
            "torch_share": round(floor_ms / statistics.median(samples["torch"]), 4),
        },
        "check": {
            "steps_compared": WARMUP_ROUNDS + args.rounds,
            "largest_weight_difference": difference,
            "rtol": RTOL,
            "atol": ATOL,
            "overflow_step_changes_nothing": None if args.opt_level == "O5" else True,
        },
    }


def table(report: dict[str, Any]) -> str:
    figures = report["figures"]
    lines = [
        f"{report['model']} {report['opt_level']} {report['optimizer']}{' with clipping' if report['clip'] else ''} on "
        f"{report['device']}, against {report['peer']}: {figures['tensors']} tensors, "
        f"{figures['elements']:,} elements, {figures['rounds']} rounds",
        f"{'':34}{'median':>10}{'quartiles':>22}",
    ]
    rows = (
        ("ampctx, ms", "ampctx_ms"),
        ("  of that, exit of scale_loss", "ampctx_scale_loss_exit_ms"),
        ("torch, ms", "torch_ms"),
        ("torch / ampctx, by round", "torch_over_ampctx"),
        ("bandwidth of a copy, GB/s", "copy_GB_per_s"),
        ("bandwidth in place, GB/s", "in_place_GB_per_s"),
    )
    for title, key in rows:
        row = figures[key]
        lines.append(f"{title:34}{row['median']:10.3f}{row['q1']:11.3f}{row['q3']:11.3f}")
    floor = figures["floor"]
    lines.append(
        f"bytes floor {floor['bytes'] / 1e6:.1f} MB = {floor['ms']:.3f} ms: "
        f"{floor['ampctx_share']:.0%} of ampctx's time, {floor['torch_share']:.0%} of torch's"
    )
    lines.append(f"weights agree, largest difference {figures['check']['largest_weight_difference']:.3g}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--model", default="resnet50", choices=list(MODELS))
    parser.add_argument("--opt-level", default="O2", choices=list(LOW_PRECISION))
    parser.add_argument("--optimizer", default="FusedAdam", choices=list(OPTIMIZERS))
    parser.add_argument("--clip", action="store_true", help=f"clip the norm of the gradients to {MAX_NORM:g}")
    parser.add_argument("--rounds", type=int, default=11, help="at least 2; default 11")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write figures, machine and versions there")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error(f"--rounds: {args.rounds} is too few for quartiles, 2 is the least")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: cuda was asked for and torch finds no CUDA device here")
    if args.json and not args.json.parent.is_dir():
        parser.error(f"--json: there is no directory {args.json.parent}")
    report = {
        "benchmark": "tail",
        "command": f"python benchmarks/tail.py --device {args.device} --model {args.model} "
        f"--opt-level {args.opt_level} --optimizer {args.optimizer} {'--clip ' if args.clip else ''}"
        f"--rounds {args.rounds}",
        "device": args.device,
        "model": args.model,
        "opt_level": args.opt_level,
        "optimizer": args.optimizer,
        "clip": args.clip,
        "peer": OPTIMIZERS[args.optimizer][2],
        **environment(args.device),
        "figures": measure(args),
    }
    print(table(report))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
