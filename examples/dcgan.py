"""Trains a DCGAN on the UCI handwritten digits in mixed precision: two models, two optimizers, three losses.

    python examples/dcgan.py                        # O2: fp16 models, fp32 batch norm and master weights

It draws samples beside real digits (dcgan_samples.png), and losses and loss scales over time (dcgan_losses.png).
"""

import torch
import torch.nn.functional as F
from shared import Parser, load_digits, plot, progress
from torch import Tensor, nn

from ampctx import amp, optimizers

LATENT, BATCH = 16, 32  # the size of the noise vector, and of a batch
# The three losses. Each has its own loss scale.
D_REAL, D_FAKE, G_FAKE = range(3)
NAMES = ("discriminator, digits", "discriminator, samples", "generator")


def make_generator(width: int) -> nn.Module:
    """Maps (N, LATENT) normal noise to (N, 1, 8, 8) images in [-1, 1]."""
    return nn.Sequential(
        nn.Linear(LATENT, 2 * width * 4 * 4, bias=False),
        nn.Unflatten(1, (2 * width, 4, 4)),
        *(nn.BatchNorm2d(2 * width), nn.ReLU()),
        nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1, bias=False),  # 8x8
        *(nn.BatchNorm2d(width), nn.ReLU()),
        nn.ConvTranspose2d(width, 1, 3, padding=1),
        nn.Tanh(),
    )


def make_discriminator(width: int) -> nn.Module:
    """Maps (N, 1, 8, 8) images to (N,) logits: above 0 means a real digit."""
    return nn.Sequential(
        *(nn.Conv2d(1, width, 4, stride=2, padding=1), nn.LeakyReLU(0.2)),  # 4x4
        nn.Conv2d(width, 2 * width, 4, stride=2, padding=1, bias=False),  # 2x2
        *(nn.BatchNorm2d(2 * width), nn.LeakyReLU(0.2)),
        nn.Conv2d(2 * width, 1, 2),  # no sigmoid: in 16 bits it rounds to 0 or 1
        nn.Flatten(0),
    )


def train(args, generator, digits):
    """Returns losses and loss scales of every step, and skipped steps of both optimizers."""
    device = digits.device
    models = make_discriminator(args.width).to(device), generator
    adams = [optimizers.FusedAdam(model.parameters(), lr=0.003, betas=(0.5, 0.999)) for model in models]
    models, adams = amp.initialize([*models], adams, opt_level=args.opt_level, num_losses=3)
    [discriminator, generator], [d_optimizer, g_optimizer] = models, adams
    history: dict[str, list] = {"loss": [], "loss_scale": []}
    choose = torch.Generator().manual_seed(0)
    for _ in progress(range(args.steps)):
        real = digits[torch.randint(len(digits), (BATCH,), generator=choose).to(device)]
        fake = generator(torch.randn(BATCH, LATENT, generator=choose).to(device))

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
def sample(generator: nn.Module, count: int = 512) -> Tensor:
    """``count`` generated images in fp32, of the same noise at each call."""
    noise = torch.randn(count, LATENT, generator=torch.Generator().manual_seed(0))
    generator.eval()
    images = generator(noise.to(next(generator.parameters()).device)).float()
    generator.train()
    return images


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


def main() -> None:
    args = Parser(__doc__, opt_level="O2", steps=400, width=16).parse_args()
    seen, labels, unseen, _ = load_digits(args.device)
    generator = make_generator(args.width).to(args.device)
    untrained = sample(generator)
    history, skipped = train(args, generator, seen)
    samples = sample(generator)

    with plot("dcgan_samples.png", columns=2, size=(9, 4.8)) as axes:
        for axis, images, title in zip(axes, (samples, unseen), ("samples", "digits"), strict=True):
            sheet = F.pad(images[:64].float().cpu(), (1, 1, 1, 1), value=-1).view(8, 8, 10, 10).transpose(1, 2)
            axis.imshow(sheet.reshape(80, 80).numpy(), cmap="gray", vmin=-1, vmax=1)
            axis.set_title(title)
            axis.set_axis_off()
    with plot("dcgan_losses.png", rows=2, sharex=True, height_ratios=(3, 2)) as (top, bottom):
        # Scales that are equal lie on each other: the narrower lines leave the wider ones to be seen.
        for i, (color, width) in enumerate((("tab:blue", 5), ("tab:green", 3), ("tab:orange", 1.2))):
            top.plot([losses[i] for losses in history["loss"]], color=color, label=NAMES[i], linewidth=0.8)
            scales = [scales[i] for scales in history["loss_scale"]]
            bottom.plot(scales, drawstyle="steps-post", color=color, linewidth=width, solid_joinstyle="miter")
        top.set(ylabel="loss", title=f"DCGAN at {args.opt_level}")
        top.legend()
        bottom.set_yscale("log", base=2)
        bottom.set(xlabel="step", ylabel="loss scale")

    for name, losses, scale in zip(NAMES, history["loss"][-1], history["loss_scale"][-1], strict=True):
        print(f"{name}: loss {losses:.3f} | loss scale {scale:g}")
    order = torch.rand((len(seen), 64), generator=torch.Generator().manual_seed(0)).argsort(dim=0)
    shuffled = seen.flatten(1).gather(0, order.to(seen.device))  # each pixel comes from another image
    one, *others = (frechet_distance(images, unseen) for images in (samples, untrained, shuffled, seen))
    told = "untrained {:.2f}, shuffled pixels {:.2f}, seen digits {:.2f}".format(*others)
    skips = f"skipped steps {skipped[0]} and {skipped[1]} of {args.steps}"
    drawn = digits_drawn(samples, seen, labels)
    print(f"distance to unseen digits {one:.2f} ({told}) | digits drawn {drawn} of 10 | {skips}")


if __name__ == "__main__":
    main()
