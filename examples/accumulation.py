"""Accumulates the gradients of several micro-batches for one step, and compares with one large batch.

    python examples/accumulation.py                     # apex's interface, at O2: delay_unscale on all but the last
    python examples/accumulation.py --opt-level O5
    python examples/accumulation.py --api torch         # torch.autocast and GradScaler: step and update once
    python examples/accumulation.py --micro-batches 16

Both runs see the same samples in the same order, so their weights differ only by rounding. The model has a LayerNorm: a
BatchNorm would use the statistics of each micro-batch, and accumulation cannot correct that.
"""

from __future__ import annotations

import argparse
import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampctx
from ampctx import amp

BATCH = 64
MAX_NORM = 1.0


def train_apex(model: nn.Module, x: Tensor, y: Tensor, micro_batches: int, opt_level: str) -> int:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level)
    size = BATCH // micro_batches
    for i, (inputs, targets) in enumerate(zip(x.split(size), y.split(size), strict=True), start=1):
        loss = F.cross_entropy(model(inputs), targets) / micro_batches
        if i % micro_batches != 0:
            # Gradients stay scaled and add up. With DistributedDataParallel, do this inside model.no_sync().
            with amp.scale_loss(loss, optimizer, delay_unscale=True) as scaled_loss:
                scaled_loss.backward()
        else:
            # The last block unscales the sum, checks it and updates the loss scale.
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
    updates = amp.state_dict()["loss_scaler0"]["unskipped"]
    amp.reset()  # lets the program train another model; the weights return to fp32, from the masters
    return updates


def train_torch(model: nn.Module, x: Tensor, y: Tensor, micro_batches: int, device: str) -> int:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = ampctx.GradScaler(device)
    size = BATCH // micro_batches
    for i, (inputs, targets) in enumerate(zip(x.split(size), y.split(size), strict=True), start=1):
        with torch.autocast(device, dtype=torch.float16):
            loss = F.cross_entropy(model(inputs), targets) / micro_batches
        # Gradients stay scaled and add up, so the scale must not change before the last micro-batch.
        scaler.scale(loss).backward()
        if i % micro_batches == 0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return scaler.state_dict()["_growth_tracker"]


def rings(count: int, device: str) -> tuple[Tensor, Tensor]:
    """Points in the plane, and the index of their ring (of four) around the origin."""
    label = torch.randint(4, (count,), device=device)
    radius = (label + 0.7 * torch.rand(count, device=device)) / 4
    angle = 6.2832 * torch.rand(count, device=device)
    return torch.stack((radius * angle.cos(), radius * angle.sin()), dim=1), label


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return int(text)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--api", default="apex", choices=["apex", "torch"], help="default apex")
    parser.add_argument("--opt-level", choices=list(amp.OPT_LEVELS), help="with --api apex; default O2")
    parser.add_argument(
        "--micro-batches", type=int, choices=[1, 2, 4, 8, 16, 32, 64], default=4, help=f"per {BATCH} samples; default 4"
    )
    parser.add_argument("--steps", type=positive, default=60, help="default 60")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    args = parser.parse_args()
    if args.api == "torch" and args.opt_level:
        parser.error("--opt-level belongs to --api apex: torch's interface has no opt levels, autocast is like O1")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: cuda was asked for and torch finds no CUDA device here; use --device cpu")
    return args


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)  # more threads slow down ops this small
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(2, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
    start = start.to(args.device)
    x, y = rings(args.steps * BATCH, args.device)

    trained, updates = [], []
    for micro_batches in (1, args.micro_batches):
        model = copy.deepcopy(start)
        if args.api == "apex":
            updates.append(train_apex(model, x, y, micro_batches, args.opt_level or "O2"))
        else:
            updates.append(train_torch(model, x, y, micro_batches, args.device))
        trained.append(model)

    weights = [nn.utils.parameters_to_vector(model.parameters()) for model in (start, *trained)]
    apart = ((weights[2] - weights[1]).norm() / (weights[1] - weights[0]).norm()).item()
    losses = [F.cross_entropy(model(x), y).item() for model in (start, *trained)]
    print(
        f"loss {losses[0]:.4f} -> {losses[1]:.4f} in large batches, {losses[2]:.4f} with {args.micro_batches} parts "
        f"| weights apart by {100 * apart:.2g}% of their way | scale updates {updates[0]} and {updates[1]}"
    )


if __name__ == "__main__":
    main()
