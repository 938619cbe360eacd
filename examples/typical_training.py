"""Trains a small conv net on handwritten digits in mixed precision, with both interfaces of ampctx.

    python examples/typical_training.py                     # apex's: amp.initialize and amp.scale_loss, at O1
    python examples/typical_training.py --opt-level O1      # any of O0 to O5
    python examples/typical_training.py --api torch         # torch's: torch.autocast and GradScaler

Only the two training functions below differ. Data and model are those of digits.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from digits import accuracy, load_digits, make_model
from torch import Tensor, nn

import ampctx
from ampctx import amp

Batches = Iterator[tuple[Tensor, Tensor]]


def train_apex(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: Batches, opt_level: str
) -> tuple[list[Tensor], float, int]:
    # Once, after the model is on its device and the optimizer exists.
    model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level)
    losses = []
    for images, labels in data:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        # The gradients are unscaled here. If one is inf or nan, step() changes nothing.
        optimizer.step()
        losses.append(loss.detach())
    return losses, amp.loss_scale(), amp.skipped_steps(optimizer)


def train_torch(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: Batches, device: str
) -> tuple[list[Tensor], float, int]:
    scaler = ampctx.GradScaler(device)  # torch.amp.GradScaler(device) has the same methods
    losses, skipped = [], 0
    for images, labels in data:
        optimizer.zero_grad()
        # Forward and loss under autocast; backward and step outside of it.
        with torch.autocast(device, dtype=torch.float16):
            loss = F.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        # Unscales the gradients, and steps if none is inf or nan.
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
        skipped += not scaler.outcome(optimizer).stepped
    return losses, scaler.get_scale(), skipped


def batches(images: Tensor, labels: Tensor, size: int, epochs: int) -> Batches:
    """Full batches, shuffled again in each epoch."""
    for _ in range(epochs):
        order = torch.randperm(len(images), device=images.device)
        for batch in order[: len(order) // size * size].split(size):
            yield images[batch], labels[batch]


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return int(text)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--api", default="apex", choices=["apex", "torch"], help="default apex")
    parser.add_argument("--opt-level", choices=list(amp.OPT_LEVELS), help="with --api apex; default O1")
    parser.add_argument("--epochs", type=positive, default=3, help="default 3")
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
    images, labels, test_images, test_labels = load_digits(torch.device(args.device))
    model = make_model().to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = batches(images, labels, size=32, epochs=args.epochs)
    if args.api == "apex":
        losses, scale, skipped = train_apex(model, optimizer, data, args.opt_level or "O1")
    else:
        losses, scale, skipped = train_torch(model, optimizer, data, args.device)
    first, last = losses[0].item(), torch.stack(losses[-20:]).mean().item()
    print(
        f"test accuracy {accuracy(model, test_images, test_labels):.2f}% | loss {first:.4f} -> {last:.4f} | "
        f"loss scale {scale:g} | skipped steps {skipped} of {len(losses)}"
    )


if __name__ == "__main__":
    main()
