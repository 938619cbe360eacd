"""Trains a small conv net on handwritten digits in mixed precision, with both interfaces of ampctx.

    python examples/typical_training.py                     # apex's: amp.initialize and amp.scale_loss, at O1
    python examples/typical_training.py --api torch         # torch's: torch.autocast and GradScaler

Only the two training functions below differ.
"""

import torch
import torch.nn.functional as F
from shared import Parser, accuracy, batches, load_digits, make_model

from ampctx import GradScaler, amp


def train_apex(model, optimizer, data, args):
    # Once, after the model is on its device and the optimizer exists.
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
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


def train_torch(model, optimizer, data, args):
    scaler = GradScaler(args.device)  # torch.amp.GradScaler has the same methods
    losses, skipped = [], 0
    for images, labels in data:
        optimizer.zero_grad()
        # Forward and loss under autocast; backward and step outside of it.
        with torch.autocast(args.device, dtype=torch.float16):
            loss = F.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        # Unscales the gradients, and steps if none is inf or nan.
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
        skipped += not scaler.outcome(optimizer).stepped
    return losses, scaler.get_scale(), skipped


def main() -> None:
    args = Parser(__doc__, opt_level="O1", apis=True, epochs=3).parse_args()
    images, labels, test_images, test_labels = load_digits(args.device)
    model = make_model().to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = (batch for _ in range(args.epochs) for batch in batches(images, labels, size=32))
    train = train_apex if args.api == "apex" else train_torch
    losses, scale, skipped = train(model, optimizer, data, args)
    first, last = losses[0].item(), torch.stack(losses[-20:]).mean().item()
    scaling = f"loss scale {scale:g} | skipped steps {skipped} of {len(losses)}"
    result = accuracy(model, test_images, test_labels)
    print(f"test accuracy {result:.2f}% | loss {first:.4f} -> {last:.4f} | {scaling}")


if __name__ == "__main__":
    main()
