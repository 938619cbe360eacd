"""Trains a DCGAN on the UCI handwritten digits in mixed precision: two models, two optimizers, three losses.

    python examples/dcgan.py                        # O2: fp16 models, fp32 batch norm and master weights
    python examples/dcgan.py --opt-level O1         # ops in fp16 by torch's autocast; O0, O3, O4 and O5 too
    python examples/dcgan.py --steps 2000           # better samples

It draws samples beside real digits (dcgan_samples.png), and losses and loss scales over time (dcgan_losses.png). It
measures the distance of the samples to held-out digits.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from digits import load_digits
from matplotlib.figure import Figure
from torch import Tensor, nn
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from ampctx import amp, optimizers

# The three losses. Each has its own loss scale.
D_REAL, D_FAKE, G_FAKE = range(3)
NAMES = ("discriminator, digits", "discriminator, samples", "generator")

# --- models -----------------------------------------------------------------------------------------------------------


class Generator(nn.Sequential):
    """Maps (N, latent) normal noise to (N, 1, 8, 8) images in [-1, 1]."""

    def __init__(self, latent: int, width: int) -> None:
        super().__init__(
            nn.Linear(latent, 2 * width * 4 * 4, bias=False),
            nn.Unflatten(1, (2 * width, 4, 4)),
            *(nn.BatchNorm2d(2 * width), nn.ReLU()),
            nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1, bias=False),  # 8x8
            *(nn.BatchNorm2d(width), nn.ReLU()),
            nn.ConvTranspose2d(width, 1, 3, padding=1),
            nn.Tanh(),
        )


class Discriminator(nn.Sequential):
    """Maps (N, 1, 8, 8) images to (N,) logits: above 0 means a real digit."""

    def __init__(self, width: int) -> None:
        super().__init__(
            nn.Conv2d(1, width, 4, stride=2, padding=1),  # 4x4
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, 4, stride=2, padding=1, bias=False),  # 2x2
            *(nn.BatchNorm2d(2 * width), nn.LeakyReLU(0.2)),
            nn.Conv2d(2 * width, 1, 2),  # no sigmoid: in 16 bits it rounds to 0 or 1
            nn.Flatten(0),
        )


# --- training ---------------------------------------------------------------------------------------------------------


def train(args: argparse.Namespace, generator: nn.Module, digits: Tensor) -> tuple[dict[str, list], list[int]]:
    """Trains both models. Returns losses and loss scales of every step, and skipped steps of both optimizers."""
    device = digits.device
    discriminator = Discriminator(args.width).to(device)
    d_optimizer = optimizers.FusedAdam(discriminator.parameters(), lr=args.lr, betas=(0.5, 0.999))
    g_optimizer = optimizers.FusedAdam(generator.parameters(), lr=args.lr, betas=(0.5, 0.999))
    [discriminator, generator], [d_optimizer, g_optimizer] = amp.initialize(
        [discriminator, generator], [d_optimizer, g_optimizer], opt_level=args.opt_level, num_losses=3
    )

    history: dict[str, list] = {"loss": [], "loss_scale": []}
    choose = torch.Generator().manual_seed(args.seed)
    for _ in tqdm(range(args.steps), unit="step", disable=args.no_progress or None):
        real = digits[torch.randint(len(digits), (args.batch_size,), generator=choose).to(device)]
        fake = generator(torch.randn(args.batch_size, args.latent, generator=choose).to(device))

        # Two losses of one optimizer: each block unscales by its own scale, and the gradients add up.
        d_optimizer.zero_grad()
        d_real = to_label(discriminator(real), 1.0)
        with amp.scale_loss(d_real, d_optimizer, loss_id=D_REAL) as scaled_loss:
            scaled_loss.backward()
        d_fake = to_label(discriminator(fake.detach()), 0.0)
        with amp.scale_loss(d_fake, d_optimizer, loss_id=D_FAKE) as scaled_loss:
            scaled_loss.backward()
        d_optimizer.step()

        # This backward reaches the discriminator, too. d_optimizer.zero_grad() drops the gradients there.
        g_optimizer.zero_grad()
        g_fake = to_label(discriminator(fake), 1.0)
        with amp.scale_loss(g_fake, g_optimizer, loss_id=G_FAKE) as scaled_loss:
            scaled_loss.backward()
        g_optimizer.step()

        # A host sync at every step: fine for a plot, too slow for a real loop.
        history["loss"].append([d_real.item(), d_fake.item(), g_fake.item()])
        history["loss_scale"].append([scale["loss_scale"] for scale in amp.state_dict().values()])
    return history, [amp.skipped_steps(optimizer) for optimizer in (d_optimizer, g_optimizer)]


def to_label(logits: Tensor, label: float) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, label))


@torch.no_grad()
def sample(generator: nn.Module, count: int, latent: int, seed: int) -> Tensor:
    """``count`` generated images in fp32."""
    noise = torch.randn(count, latent, generator=torch.Generator().manual_seed(seed))
    generator.eval()
    images = generator(noise.to(next(generator.parameters()).device)).float()
    generator.train()
    return images


# --- evaluation -------------------------------------------------------------------------------------------------------


def frechet_distance(some: Tensor, others: Tensor) -> float:
    """The Frechet distance of two sets of images, as normal distributions over their 64 pixels."""
    a, b = (t.flatten(1).double().cpu() for t in (some, others))
    cov_a, cov_b = a.T.cov(), b.T.cov()
    root = torch.linalg.eigvals(cov_a @ cov_b).real.clamp(min=0).sqrt().sum()
    return float((a.mean(0) - b.mean(0)).square().sum() + cov_a.trace() + cov_b.trace() - 2 * root)


def digits_drawn(samples: Tensor, images: Tensor, labels: Tensor) -> int:
    """The number of digits with at least 2% of the samples. A sample counts as the digit of its nearest image."""
    nearest = torch.cdist(samples.flatten(1), images.flatten(1)).argmin(dim=1)
    return int((labels[nearest].bincount(minlength=10) * 50 >= len(samples)).sum())


def shuffle_pixels(images: Tensor, seed: int) -> Tensor:
    """Noise with realistic pixel values: each pixel comes from another image."""
    order = torch.rand(images.flatten(1).shape, generator=torch.Generator().manual_seed(seed)).argsort(dim=0)
    return images.flatten(1).gather(0, order.to(images.device)).view_as(images)


# --- pictures ---------------------------------------------------------------------------------------------------------


def draw_samples(samples: Tensor, digits: Tensor, path: Path) -> None:
    """Draws 64 samples on the left and 64 digits on the right."""
    figure = Figure(figsize=(9, 4.8), dpi=120, layout="constrained")
    for axis, images, title in zip(figure.subplots(1, 2), (samples, digits), ("samples", "digits"), strict=True):
        sheet = F.pad(images[:64].float().cpu(), (1, 1, 1, 1), value=-1).view(8, 8, 10, 10).transpose(1, 2)
        axis.imshow(sheet.reshape(80, 80).numpy(), cmap="gray", vmin=-1, vmax=1)
        axis.set_title(title)
        axis.set_axis_off()
    figure.savefig(path, format="png")


def draw_losses(history: dict[str, list], opt_level: str, path: Path) -> None:
    figure = Figure(figsize=(9, 6), dpi=120, layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    step = range(1, len(history["loss"]) + 1)
    # Scales that are equal lie on each other: the narrower lines leave the wider ones to be seen.
    for i, (color, width) in enumerate((("tab:blue", 5), ("tab:green", 3), ("tab:orange", 1.2))):
        top.plot(step, [losses[i] for losses in history["loss"]], color=color, label=NAMES[i], linewidth=0.8)
        scales = [scales[i] for scales in history["loss_scale"]]
        bottom.step(step, scales, where="post", color=color, linewidth=width, solid_joinstyle="miter")
    top.set(ylabel="loss", title=f"DCGAN at {opt_level}")
    top.legend()
    bottom.set_yscale("log", base=2)
    bottom.set(xlabel="step", ylabel="loss scale")
    for axis in (top, bottom):
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png")


# --- command line -----------------------------------------------------------------------------------------------------


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not above 0")
    return value


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--opt-level", default="O2", choices=["O0", "O1", "O2", "O3", "O4", "O5"], help="default O2")
    parser.add_argument("--steps", type=positive, default=400, help="per optimizer; default 400")
    parser.add_argument("--batch-size", type=positive, default=32, help="at least 2; default 32")
    parser.add_argument("--latent", type=positive, default=16, help="size of the noise vector; default 16")
    parser.add_argument("--width", type=positive, default=16, help="channels of the narrowest layers; default 16")
    parser.add_argument("--lr", type=float, default=0.003, help="for both optimizers; default 0.003")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--output-dir", type=Path, default=Path(), metavar="DIR", help="folder for the pictures; default: this one"
    )
    parser.add_argument("--no-progress", action="store_true", help="hide the progress bar")
    args = parser.parse_args()
    if args.batch_size < 2:
        parser.error("--batch-size: batch norm needs at least 2")
    if not 0 < args.lr < float("inf"):
        parser.error(f"--lr: {args.lr} is not above 0")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: cuda was asked for and torch finds no CUDA device here; use --device cpu")
    if not args.output_dir.is_dir():
        parser.error(f"--output-dir: {args.output_dir} is not a directory")
    return args


def main() -> int:
    args = parse_args()
    # Ops this small gain little from a second thread, and lose much on busy cores.
    torch.set_num_threads(1)
    device = torch.device("cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu")
    seen, labels, unseen, _ = load_digits(device)
    torch.manual_seed(args.seed)
    generator = Generator(args.latent, args.width).to(device)
    untrained = sample(generator, 512, args.latent, args.seed)
    with logging_redirect_tqdm():  # prints amp's log above the bar
        history, skipped = train(args, generator, seen)
    samples = sample(generator, 512, args.latent, args.seed)

    draw_samples(samples, unseen, args.output_dir / "dcgan_samples.png")
    draw_losses(history, args.opt_level, args.output_dir / "dcgan_losses.png")
    print(f"pictures written to {args.output_dir / 'dcgan_samples.png'} and {args.output_dir / 'dcgan_losses.png'}")
    for name, losses, scale in zip(NAMES, history["loss"][-1], history["loss_scale"][-1], strict=True):
        print(f"{name}: loss {losses:.3f} | loss scale {scale:g}")
    noise = shuffle_pixels(seen, args.seed)
    print(
        f"distance to unseen digits {frechet_distance(samples, unseen):.2f} "
        f"(untrained {frechet_distance(untrained, unseen):.2f}, shuffled pixels {frechet_distance(noise, unseen):.2f}, "
        f"seen digits {frechet_distance(seen, unseen):.2f}) | digits drawn {digits_drawn(samples, seen, labels)} of 10 "
        f"| skipped steps {skipped[0]} and {skipped[1]} of {args.steps}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
