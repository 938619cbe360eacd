"""Clips unscaled gradients by norm or by value, with both interfaces of ampctx.

    python examples/clipping.py                                 # by norm, apex's interface, at O2; --api torch
    python examples/clipping.py --clip value                    # each element, into -0.02 .. 0.02
    python examples/clipping.py --threshold inf                 # no clipping, to see the effect of outliers

A small net learns a curve from noisy samples. One sample in 250 is an outlier, and clipping limits its gradient. The
threshold is for unscaled gradients: scaled ones would all be above it.
"""

import math

import torch
import torch.nn.functional as F
from shared import Parser
from torch import Tensor, nn

from ampctx import GradScaler, amp


def train_apex(model, optimizer, data, args, sizes):
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
    for x, y in data:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        # After the block, and not model.parameters(): at O2 and O5 step() reads the gradients of the fp32 masters.
        # Clipping hides no overflow: the block has checked the gradients, and step() will skip.
        clip(amp.master_params(optimizer), args, sizes)
        optimizer.step()
    return amp.loss_scale(), amp.skipped_steps(optimizer)


def train_torch(model, optimizer, data, args, sizes):
    scaler = GradScaler(args.device)
    skipped = 0
    for x, y in data:
        optimizer.zero_grad()
        with torch.autocast(args.device, dtype=torch.float16):
            loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        # Once per step, after the last backward. step() then does not unscale again.
        scaler.unscale_(optimizer)
        clip(model.parameters(), args, sizes)
        scaler.step(optimizer)
        scaler.update()
        skipped += not scaler.outcome(optimizer).stepped
    return scaler.get_scale(), skipped


def clip(params, args, sizes: list[tuple[float, float]]) -> None:
    """Clips gradients by norm or by value, and records the size of finite ones before and after."""
    params = list(params)

    def size() -> float:
        """The norm of all gradients together, or their largest magnitude."""
        return nn.utils.get_total_norm([p.grad for p in params], 2.0 if args.clip == "norm" else math.inf).item()

    before = size()
    if args.clip == "norm":
        nn.utils.clip_grad_norm_(params, args.threshold)  # ampctx.clip_grad_norm_ needs no host sync
    else:
        nn.utils.clip_grad_value_(params, args.threshold)
    if before < math.inf:
        sizes.append((before, size()))


def curve(x: Tensor) -> Tensor:
    return torch.sin(3 * x) + 0.5 * x


def samples(steps: int, size: int, device: str):
    for _ in range(steps):
        x = 4 * torch.rand(size, 1, device=device) - 2
        outlier = torch.rand(size, 1, device=device) < 0.004
        yield x, curve(x) + 0.1 * torch.randn_like(x) + 100 * outlier * torch.randn_like(x)


def main() -> None:
    parser = Parser(__doc__, opt_level="O2", apis=True, steps=300)
    parser.add_argument("--clip", default="norm", choices=["norm", "value"], help="default norm")
    parser.add_argument("--threshold", type=float, help="default 1 for a norm, 0.02 for values")
    args = parser.parse_args()
    if args.threshold is None:
        args.threshold = {"norm": 1.0, "value": 0.02}[args.clip]
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x = torch.linspace(-2, 2, 200, device=args.device)[:, None]
    error_before = F.mse_loss(model(x), curve(x)).item()
    data, sizes = samples(args.steps, 64, args.device), []
    train = train_apex if args.api == "apex" else train_torch
    scale, skipped = train(model, optimizer, data, args, sizes)
    with torch.no_grad():
        error = F.mse_loss(model(x), curve(x)).item()
    clipped = sum(before > args.threshold for before, _ in sizes)
    before, after = (max(column) for column in zip(*sizes, strict=True)) if sizes else (0.0, 0.0)
    told = f"clipped {clipped} of {len(sizes)} steps: largest {args.clip} {before:.4g} before, {after:.4g} after"
    print(f"error {error_before:.4f} -> {error:.4f} | {told} | loss scale {scale:g} | skipped steps {skipped}")


if __name__ == "__main__":
    main()
