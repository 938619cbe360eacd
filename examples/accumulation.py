"""Accumulates the gradients of several micro-batches for one step, and compares with one large batch.

    python examples/accumulation.py                     # apex's interface, at O2: delay_unscale on all but the last
    python examples/accumulation.py --api torch         # torch.autocast and GradScaler: step and update once

Both runs see the same samples in the same order, so their weights differ only by rounding. The model has a LayerNorm: a
BatchNorm would use the statistics of each micro-batch, and accumulation cannot correct that.
"""

import copy

import torch
import torch.nn.functional as F
from shared import Parser
from torch import Tensor, nn

from ampctx import GradScaler, amp

BATCH, MAX_NORM = 64, 1.0


def train_apex(model, x, y, micro_batches, args):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
    size = BATCH // micro_batches
    for i, (inputs, targets) in enumerate(zip(x.split(size), y.split(size), strict=True), start=1):
        loss = F.cross_entropy(model(inputs), targets) / micro_batches
        # Gradients stay scaled and add up. With DistributedDataParallel, do this inside model.no_sync(). The last block
        # unscales the sum, checks it and updates the loss scale.
        more = i % micro_batches != 0
        with amp.scale_loss(loss, optimizer, delay_unscale=more) as scaled_loss:
            scaled_loss.backward()
        if not more:
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
    updates = amp.state_dict()["loss_scaler0"]["unskipped"]
    amp.reset()  # lets the program train another model; the weights return to fp32, from the masters
    return updates


def train_torch(model, x, y, micro_batches, args):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = GradScaler(args.device)
    size = BATCH // micro_batches
    for i, (inputs, targets) in enumerate(zip(x.split(size), y.split(size), strict=True), start=1):
        with torch.autocast(args.device, dtype=torch.float16):
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


def main() -> None:
    parser = Parser(__doc__, opt_level="O2", apis=True, steps=60)
    parser.add_argument("--micro-batches", type=int, choices=[1, 2, 4, 8, 16, 32, 64], default=4, help="default 4")
    args = parser.parse_args()
    start = nn.Sequential(nn.Linear(2, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
    start = start.to(args.device)
    x, y = rings(args.steps * BATCH, args.device)
    train = train_apex if args.api == "apex" else train_torch
    trained, updates = [], []
    for micro_batches in (1, args.micro_batches):
        trained.append(copy.deepcopy(start))
        updates.append(train(trained[-1], x, y, micro_batches, args))
    weights = [nn.utils.parameters_to_vector(model.parameters()) for model in (start, *trained)]
    apart = ((weights[2] - weights[1]).norm() / (weights[1] - weights[0]).norm()).item()
    losses = [F.cross_entropy(model(x), y).item() for model in (start, *trained)]
    print(
        f"loss {losses[0]:.4f} -> {losses[1]:.4f} in large batches, {losses[2]:.4f} with {args.micro_batches} parts "
        f"| weights apart by {100 * apart:.2g}% of their way | scale updates {updates[0]} and {updates[1]}"
    )


if __name__ == "__main__":
    main()
