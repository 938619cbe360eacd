"""Trains two models with two losses over one graph, one or two optimizers, with both interfaces of ampctx.

    python examples/several_losses.py                               # apex's interface, at O2; --api torch for torch's
    python examples/several_losses.py --models 1 --optimizers 2     # amp.initialize takes all four combinations
    python examples/several_losses.py --scales shared               # one loss scale, delay_unscale on the first loss

Both losses are 0 if the first model gives 8/19 and the second 1/19 of the target. The second loss has a factor of 100,
so its gradients overflow at loss scales that are fine for the first.
"""

import torch
import torch.nn.functional as F
from shared import Parser
from torch import Tensor, nn

from ampctx import GradScaler, amp


class Two(nn.Module):
    """Two models as one."""

    def __init__(self, models: list[nn.Module]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [model(x) for model in self.models]


def losses_of(models: list[nn.Module], x: Tensor, target: Tensor) -> list[Tensor]:
    outputs = models[0](x) if len(models) == 1 else [model(x) for model in models]
    first, second = 2 * outputs[0] + 3 * outputs[1], 3 * outputs[0] - 5 * outputs[1]
    return [F.mse_loss(first, target), 100 * F.mse_loss(second, target)]


def initialize(models: list[nn.Module], optimizers: list, **options) -> None:
    """Passes one object or a list, and gets the same objects back in the same shape."""
    match len(models), len(optimizers):
        case 1, 1:
            models[0], optimizers[0] = amp.initialize(models[0], optimizers[0], **options)
        case 1, 2:
            models[0], [*optimizers] = amp.initialize(models[0], optimizers, **options)
        case 2, 1:
            [*models], optimizers[0] = amp.initialize(models, optimizers[0], **options)
        case 2, 2:
            [*models], [*optimizers] = amp.initialize(models, optimizers, **options)


def train_apex(models, optimizers, data, args):
    initialize(models, optimizers, opt_level=args.opt_level, num_losses=1 if args.scales == "shared" else 2)
    for x, target in data:
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses = losses_of(models, x, target)
        if args.scales == "shared":
            # One scale: gradients of the first loss stay scaled, and the last block unscales the sum.
            first, second = {"delay_unscale": True}, {}
        else:
            # A scale for each loss: each block unscales, and the gradients add up. An overflow lowers its own scale.
            first, second = {"loss_id": 0}, {"loss_id": 1}
        # Name all optimizers whose parameters the backward reaches. The second backward uses the same graph.
        with amp.scale_loss(losses[0], optimizers, **first) as scaled_loss:
            scaled_loss.backward(retain_graph=True)
        with amp.scale_loss(losses[1], optimizers, **second) as scaled_loss:
            scaled_loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    return [scaler["loss_scale"] for scaler in amp.state_dict().values()]


def train_torch(models, optimizers, data, args):
    scaler = GradScaler(args.device)
    for x, target in data:
        for optimizer in optimizers:
            optimizer.zero_grad()
        with torch.autocast(args.device, dtype=torch.float16):
            losses = losses_of(models, x, target)
        scaler.scale(losses[0]).backward(retain_graph=True)
        scaler.scale(losses[1]).backward()
        # Unscale only to read or change gradients. step() unscales the others.
        scaler.unscale_(optimizers[0])
        torch.nn.utils.clip_grad_norm_(optimizers[0].param_groups[0]["params"], 1e4)
        # Each optimizer skips by itself. Call update() once, after all steps.
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    return [scaler.get_scale()]


def main() -> None:
    parser = Parser(__doc__, opt_level="O2", apis=True, steps=200)
    parser.add_argument("--models", type=int, choices=[1, 2], default=2, help="default 2")
    parser.add_argument("--optimizers", type=int, choices=[1, 2], default=2, help="default 2")
    parser.add_argument("--scales", default="per-loss", choices=["per-loss", "shared"], help="with --api apex")
    args = parser.parse_args()
    parts = [nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1)).to(args.device) for _ in range(2)]
    models = parts if args.models == 2 else [Two(parts)]
    owned = [p.parameters() for p in parts] if args.optimizers == 2 else [nn.ModuleList(parts).parameters()]
    optimizers = [torch.optim.Adam(params, lr=0.02) for params in owned]

    def batches():
        for _ in range(args.steps):
            x = torch.randn(64, 4, device=args.device)
            yield x, torch.tanh(x.sum(1, keepdim=True))

    x, target = next(batches())
    with torch.no_grad():
        before = losses_of(models, x, target)
    train = train_apex if args.api == "apex" else train_torch
    scales = " and ".join(f"{scale:g}" for scale in train(models, optimizers, batches(), args))
    with torch.no_grad():
        after = losses_of(models, x, target)
    losses = [f"loss {i}: {before[i]:.4f} -> {after[i]:.4f}" for i in range(2)]
    print(" | ".join([*losses, f"loss scales {scales}"]))


if __name__ == "__main__":
    main()
