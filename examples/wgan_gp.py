"""Trains a Wasserstein GAN with gradient penalty on eight clusters, with both interfaces of ampctx.

    python examples/wgan_gp.py                          # apex's interface, at O1; a loss scale for each of two losses
    python examples/wgan_gp.py --opt-level O2
    python examples/wgan_gp.py --api torch              # torch.autocast, and a GradScaler for each of two losses
    python examples/wgan_gp.py --plot wgan_gp.png       # draw real and generated points

The generator has BatchNorm. The critic has LayerNorm: the penalty needs its gradient at each sample alone, and with
BatchNorm that gradient would depend on the other samples.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import ampctx
from ampctx import amp

LATENT = 8
BATCH = 64
CRITIC_STEPS = 3  # per step of the generator
PENALTY = 1.0


def mixture(real: Tensor, fake: Tensor) -> Tensor:
    """Points between real and generated ones, where the norm of the critic's gradient should be 1."""
    t = torch.rand(len(real), 1, device=real.device)
    return (t * real + (1 - t) * fake).requires_grad_()


def penalty_of(grad: Tensor) -> Tensor:
    return PENALTY * (grad.norm(dim=1) - 1).square().mean()


def train_apex(
    generator: nn.Module, critic: nn.Module, optimizers: list[torch.optim.Optimizer], steps: int, opt_level: str
) -> list[float]:
    [generator, critic], [g_optimizer, c_optimizer] = amp.initialize(
        [generator, critic], optimizers, opt_level=opt_level, num_losses=2
    )
    device = next(critic.parameters()).device
    for _ in range(steps):
        for _ in range(CRITIC_STEPS):
            real = circle(BATCH, device)
            with torch.no_grad():
                fake = generator(torch.randn(BATCH, LATENT, device=device))
            mixed = mixture(real, fake)
            score = critic(mixed)
            # Scale this backward by hand, because small fp16 gradients would round to 0, and run it without the casts
            # of O1. Reading the scale is a host sync.
            scale = amp.loss_scale()
            with amp.disable_casts():
                (scaled_grad,) = torch.autograd.grad(score.sum() * scale, mixed, create_graph=True)
            loss = critic(fake).mean() - critic(real).mean() + penalty_of(scaled_grad.float() / scale)
            c_optimizer.zero_grad()
            with amp.scale_loss(loss, c_optimizer, loss_id=0) as scaled_loss:
                scaled_loss.backward()
            c_optimizer.step()

        critic.requires_grad_(False)  # this backward goes through the critic, but must not train it
        loss = -critic(generator(torch.randn(BATCH, LATENT, device=device))).mean()
        g_optimizer.zero_grad()
        with amp.scale_loss(loss, g_optimizer, loss_id=1) as scaled_loss:
            scaled_loss.backward()
        g_optimizer.step()
        critic.requires_grad_(True)
    return [scaler["loss_scale"] for scaler in amp.state_dict().values()]


def train_torch(
    generator: nn.Module, critic: nn.Module, optimizers: list[torch.optim.Optimizer], steps: int
) -> list[float]:
    g_optimizer, c_optimizer = optimizers
    device = next(critic.parameters()).device
    # Each loss has its own steps, so each gets its own scaler. A shared scaler would need an update after each step.
    c_scaler, g_scaler = (ampctx.GradScaler(device.type) for _ in range(2))
    for _ in range(steps):
        for _ in range(CRITIC_STEPS):
            real = circle(BATCH, device)
            with torch.autocast(device.type, dtype=torch.float16):
                with torch.no_grad():
                    fake = generator(torch.randn(BATCH, LATENT, device=device)).float()
                mixed = mixture(real, fake)
                score = critic(mixed).sum()
            (scaled_grad,) = torch.autograd.grad(c_scaler.scale(score), mixed, create_graph=True)
            grad = scaled_grad * (1.0 / c_scaler.get_scale())
            with torch.autocast(device.type, dtype=torch.float16):
                loss = critic(fake).mean() - critic(real).mean() + penalty_of(grad)
            c_optimizer.zero_grad()
            c_scaler.scale(loss).backward()
            c_scaler.step(c_optimizer)
            c_scaler.update()

        critic.requires_grad_(False)
        with torch.autocast(device.type, dtype=torch.float16):
            loss = -critic(generator(torch.randn(BATCH, LATENT, device=device))).mean()
        g_optimizer.zero_grad()
        g_scaler.scale(loss).backward()
        g_scaler.step(g_optimizer)
        g_scaler.update()
        critic.requires_grad_(True)
    return [c_scaler.get_scale(), g_scaler.get_scale()]


def circle(count: int, device: torch.device) -> Tensor:
    """Points from eight clusters on the unit circle."""
    angle = torch.randint(8, (count, 1), device=device) * (torch.pi / 4)
    return torch.cat((angle.cos(), angle.sin()), dim=1) + 0.05 * torch.randn(count, 2, device=device)


def energy_distance(a: Tensor, b: Tensor) -> float:
    """The energy distance of two samples; 0 in expectation if their distributions are equal."""
    return (2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean()).item()


def make_generator() -> nn.Module:
    def hidden(n_in: int, n_out: int) -> list[nn.Module]:
        return [nn.Linear(n_in, n_out), nn.BatchNorm1d(n_out), nn.ReLU()]

    return nn.Sequential(*hidden(LATENT, 48), *hidden(48, 48), nn.Linear(48, 2))


def make_critic() -> nn.Module:
    def hidden(n_in: int, n_out: int) -> list[nn.Module]:
        return [nn.Linear(n_in, n_out), nn.LayerNorm(n_out), nn.SiLU()]

    return nn.Sequential(*hidden(2, 48), *hidden(48, 48), nn.Linear(48, 1))


@torch.no_grad()
def generated(generator: nn.Module, count: int, device: str) -> Tensor:
    return generator(torch.randn(count, LATENT, device=device)).float()


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return int(text)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--api", default="apex", choices=["apex", "torch"], help="default apex")
    # No O3: there torch's Adam keeps its averages in fp16, where squared gradients and eps become 0.
    parser.add_argument("--opt-level", choices=["O0", "O1", "O2", "O4", "O5"], help="with --api apex; default O1")
    parser.add_argument("--steps", type=positive, default=100, help="default 100")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw real and generated points into this PNG")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    args = parser.parse_args()
    if args.api == "torch" and args.opt_level:
        parser.error("--opt-level belongs to --api apex: torch's interface has no opt levels, autocast is like O1")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: cuda was asked for and torch finds no CUDA device here; use --device cpu")
    if args.plot and (args.plot.is_dir() or not args.plot.parent.is_dir()):
        parser.error(f"--plot: {args.plot} cannot be written: it is a directory or lies in none")
    return args


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)  # more threads slow down ops this small
    torch.manual_seed(0)
    generator, critic = make_generator().to(args.device), make_critic().to(args.device)
    optimizers = [torch.optim.Adam(m.parameters(), lr=2e-3, betas=(0.5, 0.9)) for m in (generator, critic)]
    real = circle(2000, torch.device(args.device))
    before = energy_distance(generated(generator, 2000, args.device), real)
    if args.api == "apex":
        scales = train_apex(generator, critic, optimizers, args.steps, args.opt_level or "O1")
    else:
        scales = train_torch(generator, critic, optimizers, args.steps)
    points = generated(generator, 2000, args.device)
    if args.plot:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5, 5), dpi=120, layout="constrained")
        axis = figure.subplots()
        for name, sample in (("real", real), ("generated", points)):
            axis.plot(*sample.T.cpu(), ".", markersize=2, label=name)
        axis.set(aspect="equal", title=f"energy distance {energy_distance(points, real):.4f}")
        axis.legend()
        figure.savefig(args.plot, format="png")
    print(
        f"energy distance {before:.4f} -> {energy_distance(points, real):.4f} | "
        f"loss scales {scales[0]:g} (critic) and {scales[1]:g} (generator)"
    )


if __name__ == "__main__":
    main()
