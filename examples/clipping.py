"""Clips unscaled gradients by norm or by value, with both interfaces of ampctx.

    python examples/clipping.py                                 # by norm, apex's interface, at O2
    python examples/clipping.py --clip value                    # each element, into -0.02 .. 0.02
    python examples/clipping.py --api torch                     # torch.autocast and GradScaler
    python examples/clipping.py --threshold inf                 # no clipping, to see the effect of outliers

A small net learns a curve from noisy samples. One sample in 250 is an outlier, and clipping limits its gradient. The
threshold is for unscaled gradients: scaled ones would all be above it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampctx
from ampctx import amp

Batches = Iterator[tuple[Tensor, Tensor]]
# Clips the gradients of parameters, in place.
Clip = Callable[[Iterable[Tensor]], None]


def train_apex(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: Batches, clip: Clip, opt_level: str
) -> tuple[float, int]:
    model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level)
    for x, y in data:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        # After the block, and not model.parameters(): at O2 and O5 step() reads the gradients of the fp32 masters.
        # Clipping hides no overflow: the block has checked the gradients, and step() will skip.
        clip(amp.master_params(optimizer))
        optimizer.step()
    return amp.loss_scale(), amp.skipped_steps(optimizer)


def train_torch(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: Batches, clip: Clip, device: str
) -> tuple[float, int]:
    scaler = ampctx.GradScaler(device)
    skipped = 0
    for x, y in data:
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.float16):
            loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        # Once per step, after the last backward. step() then does not unscale again.
        scaler.unscale_(optimizer)
        clip(model.parameters())
        scaler.step(optimizer)
        scaler.update()
        skipped += not scaler.outcome(optimizer).stepped
    return scaler.get_scale(), skipped


class Clipping:
    """Clips gradients, and records the size of finite ones before and after."""

    def __init__(self, kind: str, threshold: float) -> None:
        self.kind, self.threshold = kind, threshold
        self.before: list[float] = []
        self.after: list[float] = []

    def __call__(self, params: Iterable[Tensor]) -> None:
        params = list(params)
        before = self.size(params)
        if self.kind == "norm":
            torch.nn.utils.clip_grad_norm_(params, self.threshold)  # ampctx.clip_grad_norm_ needs no host sync
        else:
            torch.nn.utils.clip_grad_value_(params, self.threshold)
        if before < float("inf"):
            self.before.append(before)
            self.after.append(self.size(params))

    def size(self, params: list[Tensor]) -> float:
        """The norm of all gradients together, or their largest magnitude."""
        norm_type = 2.0 if self.kind == "norm" else float("inf")
        return torch.nn.utils.get_total_norm([p.grad for p in params], norm_type).item()


def curve(x: Tensor) -> Tensor:
    return torch.sin(3 * x) + 0.5 * x


def samples(steps: int, size: int, device: str) -> Batches:
    for _ in range(steps):
        x = 4 * torch.rand(size, 1, device=device) - 2
        outlier = torch.rand(size, 1, device=device) < 0.004
        yield x, curve(x) + 0.1 * torch.randn_like(x) + 100 * outlier * torch.randn_like(x)


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return int(text)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--api", default="apex", choices=["apex", "torch"], help="default apex")
    parser.add_argument("--opt-level", choices=list(amp.OPT_LEVELS), help="with --api apex; default O2")
    parser.add_argument("--clip", default="norm", choices=["norm", "value"], help="default norm")
    parser.add_argument("--threshold", type=float, help="default 1 for a norm, 0.02 for values")
    parser.add_argument("--steps", type=positive, default=300, help="default 300")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    args = parser.parse_args()
    if args.threshold is None:
        args.threshold = {"norm": 1.0, "value": 0.02}[args.clip]
    if not args.threshold > 0:
        parser.error(f"--threshold: {args.threshold} is not above 0")
    if args.api == "torch" and args.opt_level:
        parser.error("--opt-level belongs to --api apex: torch's interface has no opt levels, autocast is like O1")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: cuda was asked for and torch finds no CUDA device here; use --device cpu")
    return args


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)  # more threads slow down ops this small
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    clip = Clipping(args.clip, args.threshold)
    x = torch.linspace(-2, 2, 200, device=args.device)[:, None]
    error_before = F.mse_loss(model(x), curve(x)).item()
    data = samples(args.steps, 64, args.device)
    if args.api == "apex":
        scale, skipped = train_apex(model, optimizer, data, clip, args.opt_level or "O2")
    else:
        scale, skipped = train_torch(model, optimizer, data, clip, args.device)
    with torch.no_grad():
        error = F.mse_loss(model(x), curve(x)).item()
    clipped = sum(size > args.threshold for size in clip.before)
    largest_before, largest_after = max(clip.before, default=0.0), max(clip.after, default=0.0)
    print(
        f"error {error_before:.4f} -> {error:.4f} | clipped {clipped} of {len(clip.before)} steps: largest {args.clip} "
        f"{largest_before:.4g} before, {largest_after:.4g} after | loss scale {scale:g} | skipped steps {skipped}"
    )


if __name__ == "__main__":
    main()
