"""Adds the norm of the gradients to the loss (a double backward), with both interfaces of ampctx.

    python examples/gradient_penalty.py                     # apex's interface, at O2
    python examples/gradient_penalty.py --opt-level O1
    python examples/gradient_penalty.py --api torch         # torch.autocast and GradScaler
    python examples/gradient_penalty.py --weight 0          # no penalty, to compare with

torch.autograd.grad returns the gradients of the penalty. No optimizer unscales them, so the program scales and unscales
them itself. The double backward goes through a BatchNorm in training mode. wgan_gp.py has the penalty of a GAN.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampctx
from ampctx import amp

Batches = Iterator[tuple[Tensor, Tensor]]


def norm_of(grads: list[Tensor]) -> Tensor:
    return torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()


def train_apex(model: nn.Module, data: Batches, weight: float, opt_level: str) -> tuple[list[float], float, int]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level)
    norms = []
    for x, y in data:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)

        # In fp16 small gradients would round to 0, so scale this backward, too. Reading the scale is a host sync. Call
        # torch.autograd.grad without the casts of O1.
        scale = amp.loss_scale()
        with amp.disable_casts():
            # model.parameters(), because the graph does not contain amp.master_params.
            scaled_grads = torch.autograd.grad(loss * scale, list(model.parameters()), create_graph=True)
        # Gradients of an fp16 model are fp16: divide and square them in fp32.
        grad_norm = norm_of([grad.float() / scale for grad in scaled_grads])

        with amp.scale_loss(loss + weight * grad_norm, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        norms.append(grad_norm.item())
    return norms, amp.loss_scale(), amp.skipped_steps(optimizer)


def train_torch(model: nn.Module, data: Batches, weight: float, device: str) -> tuple[list[float], float, int]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = ampctx.GradScaler(device)
    norms, skipped = [], 0
    for x, y in data:
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)

        scaled_grads = torch.autograd.grad(scaler.scale(loss), list(model.parameters()), create_graph=True)
        # unscale_ does not see these gradients, because they are in no .grad.
        inv_scale = 1.0 / scaler.get_scale()
        grads = [grad * inv_scale for grad in scaled_grads]

        # The penalty belongs to the forward pass, under autocast.
        with torch.autocast(device, dtype=torch.float16):
            grad_norm = norm_of(grads)
            loss = loss + weight * grad_norm
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        norms.append(grad_norm.item())
        skipped += not scaler.outcome(optimizer).stepped
    return norms, scaler.get_scale(), skipped


def moons(count: int, device: str) -> tuple[Tensor, Tensor]:
    """Points on two interleaved half circles, and the index of their circle."""
    label = torch.randint(2, (count,), device=device)
    angle = 3.1416 * torch.rand(count, device=device)
    side = 1.0 - 2.0 * label
    x = torch.stack((angle.cos() * side + label, angle.sin() * side + 0.5 * label), dim=1)
    return x + 0.3 * torch.randn_like(x), label


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return int(text)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--api", default="apex", choices=["apex", "torch"], help="default apex")
    parser.add_argument("--opt-level", choices=list(amp.OPT_LEVELS), help="with --api apex; default O2")
    parser.add_argument("--weight", type=float, default=0.5, help="weight of the penalty; default 0.5")
    parser.add_argument("--steps", type=positive, default=200, help="default 200")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    args = parser.parse_args()
    if not args.weight >= 0:
        parser.error(f"--weight: {args.weight} is not 0 or above")
    if args.api == "torch" and args.opt_level:
        parser.error("--opt-level belongs to --api apex: torch's interface has no opt levels, autocast is like O1")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: cuda was asked for and torch finds no CUDA device here; use --device cpu")
    return args


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)  # more threads slow down ops this small
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(2, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2)
    )
    model = model.to(args.device)
    data = (moons(32, args.device) for _ in range(args.steps))
    if args.api == "apex":
        norms, scale, skipped = train_apex(model, data, args.weight, args.opt_level or "O2")
    else:
        norms, scale, skipped = train_torch(model, data, args.weight, args.device)
    x, y = moons(1000, args.device)
    model.eval()
    with torch.no_grad():
        accuracy = 100 * (model(x).argmax(1) == y).float().mean().item()
    last = norms[-50:]
    print(
        f"accuracy {accuracy:.1f}% | gradient norm {norms[0]:.3f} at first, {sum(last) / len(last):.3f} in "
        f"the last {len(last)} steps | loss scale {scale:g} | skipped steps {skipped} of {len(norms)}"
    )


if __name__ == "__main__":
    main()
