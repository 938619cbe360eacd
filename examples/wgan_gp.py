"""Trains a Wasserstein GAN with gradient penalty on eight clusters, with both interfaces of ampctx.

    python examples/wgan_gp.py                          # apex's interface, at O1; a loss scale for each of two losses
    python examples/wgan_gp.py --api torch              # torch.autocast, and a GradScaler for each of two losses

The critic has LayerNorm: the penalty needs its gradient at each sample alone. BatchNorm would mix in other samples.
"""

import torch
from shared import LEVELS_OF_ADAM, Parser, plot, writable
from torch import Tensor, nn

from ampctx import GradScaler, amp

LATENT, BATCH = 8, 64
CRITIC_STEPS = 3  # per step of the generator


def mixture(real: Tensor, fake: Tensor) -> Tensor:
    """Points between real and generated ones, where the norm of the critic's gradient should be 1."""
    t = torch.rand(len(real), 1, device=real.device)
    return (t * real + (1 - t) * fake).requires_grad_()


def penalty_of(grad: Tensor) -> Tensor:
    return (grad.norm(dim=1) - 1).square().mean()


def train_apex(generator, critic, optimizers, args):
    models, optimizers = amp.initialize([generator, critic], optimizers, opt_level=args.opt_level, num_losses=2)
    [generator, critic], [g_optimizer, c_optimizer] = models, optimizers
    for _ in range(args.steps):
        for _ in range(CRITIC_STEPS):
            real = circle(BATCH, args.device)
            with torch.no_grad():
                fake = generator(torch.randn(BATCH, LATENT, device=args.device))
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
        loss = -critic(generator(torch.randn(BATCH, LATENT, device=args.device))).mean()
        g_optimizer.zero_grad()
        with amp.scale_loss(loss, g_optimizer, loss_id=1) as scaled_loss:
            scaled_loss.backward()
        g_optimizer.step()
        critic.requires_grad_(True)
    return [scaler["loss_scale"] for scaler in amp.state_dict().values()]


def train_torch(generator, critic, optimizers, args):
    g_optimizer, c_optimizer = optimizers
    # Each loss has its own steps, so each gets its own scaler. A shared scaler would need an update after each step.
    c_scaler, g_scaler = (GradScaler(args.device) for _ in range(2))
    for _ in range(args.steps):
        for _ in range(CRITIC_STEPS):
            real = circle(BATCH, args.device)
            with torch.autocast(args.device, dtype=torch.float16):
                with torch.no_grad():
                    fake = generator(torch.randn(BATCH, LATENT, device=args.device)).float()
                mixed = mixture(real, fake)
                score = critic(mixed).sum()
            (scaled_grad,) = torch.autograd.grad(c_scaler.scale(score), mixed, create_graph=True)
            grad = scaled_grad * (1.0 / c_scaler.get_scale())
            with torch.autocast(args.device, dtype=torch.float16):
                loss = critic(fake).mean() - critic(real).mean() + penalty_of(grad)
            c_optimizer.zero_grad()
            c_scaler.scale(loss).backward()
            c_scaler.step(c_optimizer)
            c_scaler.update()
        critic.requires_grad_(False)
        with torch.autocast(args.device, dtype=torch.float16):
            loss = -critic(generator(torch.randn(BATCH, LATENT, device=args.device))).mean()
        g_optimizer.zero_grad()
        g_scaler.scale(loss).backward()
        g_scaler.step(g_optimizer)
        g_scaler.update()
        critic.requires_grad_(True)
    return [c_scaler.get_scale(), g_scaler.get_scale()]


def circle(count: int, device) -> Tensor:
    """Points from eight clusters on the unit circle."""
    angle = torch.randint(8, (count, 1), device=device) * (torch.pi / 4)
    return torch.cat((angle.cos(), angle.sin()), dim=1) + 0.05 * torch.randn(count, 2, device=device)


@torch.no_grad()
def energy_distance(a: Tensor, b: Tensor) -> float:
    """The energy distance of two samples; 0 in expectation if their distributions are equal."""
    return (2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean()).item()


def make_net(n_in: int, n_out: int, norm: type[nn.Module], activation: type[nn.Module]) -> nn.Module:
    hidden = [nn.Linear(n_in, 48), norm(48), activation(), nn.Linear(48, 48), norm(48), activation()]
    return nn.Sequential(*hidden, nn.Linear(48, n_out))


def main() -> None:
    parser = Parser(__doc__, opt_level="O1", levels=LEVELS_OF_ADAM, apis=True, steps=100)
    parser.add_argument("--plot", type=writable, metavar="PATH", help="draw real and generated points into this PNG")
    args = parser.parse_args()
    generator = make_net(LATENT, 2, nn.BatchNorm1d, nn.ReLU).to(args.device)
    critic = make_net(2, 1, nn.LayerNorm, nn.SiLU).to(args.device)
    optimizers = [torch.optim.Adam(m.parameters(), lr=2e-3, betas=(0.5, 0.9)) for m in (generator, critic)]
    real = circle(2000, args.device)
    before = energy_distance(generator(torch.randn(2000, LATENT, device=args.device)), real)
    train = train_apex if args.api == "apex" else train_torch
    scales = train(generator, critic, optimizers, args)
    points = generator(torch.randn(2000, LATENT, device=args.device)).float()
    if args.plot:
        with plot(args.plot, size=(5, 5)) as axis:
            for name, sample in (("real", real), ("generated", points)):
                axis.plot(*sample.detach().T.cpu(), ".", markersize=2, label=name)
            axis.set(aspect="equal", title=f"energy distance {energy_distance(points, real):.4f}")
            axis.legend()
    scales = f"loss scales {scales[0]:g} (critic) and {scales[1]:g} (generator)"
    print(f"energy distance {before:.4f} -> {energy_distance(points, real):.4f} | {scales}")


if __name__ == "__main__":
    main()
