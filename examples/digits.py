"""Trains a small convolutional net on the UCI handwritten digits in mixed precision, with apex's loop.

    python examples/digits.py                                   # O1: fp32 weights, fp16 where it suits; seconds
    python examples/digits.py --opt-level O2                    # fp16 model, fp32 batch norm and master weights
    python examples/digits.py --optimizer FusedLAMB             # any optimizer of ampctx.optimizers, or torch's SGD
    python examples/digits.py --epochs 25 --first-loss-scale 65536    # longer, from the loss scale of other programs
    python examples/digits.py --checkpoint digits.pt            # saves after every epoch ...
    python examples/digits.py --resume digits.pt --epochs 40    # ... and resumes

A dynamic loss scale starts far too high, so that the first steps are skipped. Then the net trains in fp32, too. The
program prints the test accuracies and draws loss, loss scale and skipped steps over time (digits.png).
"""

from __future__ import annotations

import argparse
import gzip
import os
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from ampctx import amp, clip_grad_norm_, optimizers

DATA = Path(__file__).resolve().parent / "data" / "digits.csv.gz"
CHECKPOINT_FORMAT = "ampctx-digits-3"
# The optimizer, and the learning rate of its first epoch.
OPTIMIZERS = {
    "FusedSGD": (lambda p, lr: optimizers.FusedSGD(p, lr=lr, momentum=0.9, weight_decay=5e-4), 0.05),
    "FusedAdam": (lambda p, lr: optimizers.FusedAdam(p, lr=lr, weight_decay=5e-4), 0.005),
    "FusedLAMB": (lambda p, lr: optimizers.FusedLAMB(p, lr=lr, weight_decay=5e-4), 0.005),
    "FusedNovoGrad": (lambda p, lr: optimizers.FusedNovoGrad(p, lr=lr, weight_decay=5e-4), 0.1),
    "FusedAdagrad": (lambda p, lr: optimizers.FusedAdagrad(p, lr=lr, weight_decay=5e-4), 0.02),
    "SGD": (lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, weight_decay=5e-4), 0.05),
}
DEFAULT_LOSS_SCALE = {"O0": 1.0, "O1": "dynamic", "O2": "dynamic", "O3": 1.0, "O4": 1.0, "O5": 1.0}
FP32 = {"opt_level": "O0", "loss_scale": None, "first_loss_scale": None, "checkpoint": None}


class UserError(Exception):
    """An error that the user can fix: prints one line on stderr, with exit code 2."""


# --- data and model ---------------------------------------------------------------------------------------------------


def load_digits(device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images (N, 1, 8, 8) in [-1, 1] and labels (N,): training, then test. Every fourth of a class is for test."""
    with gzip.open(DATA, "rt") as file:
        table = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.float32))
    images, labels = table[:, :64].reshape(-1, 1, 8, 8) / 8 - 1, table[:, 64].long()
    test = torch.zeros(len(labels), dtype=torch.bool)
    for digit in range(10):
        test[(labels == digit).nonzero().flatten()[3::4]] = True
    return tuple(t.to(device) for t in (images[~test], labels[~test], images[test], labels[test]))


def make_model(width: int = 16) -> nn.Module:
    def conv(n_in: int, n_out: int) -> list[nn.Module]:
        return [nn.Conv2d(n_in, n_out, 3, padding=1, bias=False), nn.BatchNorm2d(n_out), nn.ReLU()]

    features = [*conv(1, width), nn.MaxPool2d(2), *conv(width, 2 * width), nn.MaxPool2d(2)]
    return nn.Sequential(*features, nn.Flatten(), nn.Linear(2 * width * 4, 10))


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        correct = (model(images).argmax(dim=1) == labels).float().mean().item()
    model.train()
    return 100 * correct


# --- checkpoints ------------------------------------------------------------------------------------------------------


def save_checkpoint(path: Path, args, epoch, history, model, optimizer, schedule) -> None:
    """Writes a temporary file and renames it, so that a crash leaves the previous checkpoint intact."""
    checkpoint = {
        "format": CHECKPOINT_FORMAT,
        "opt_level": args.opt_level,
        "optimizer_name": args.optimizer,
        "epoch": epoch,
        "history": history,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "amp": amp.state_dict(),
    }
    part = path.with_name(path.name + ".part")
    torch.save(checkpoint, part)
    os.replace(part, path)


def read_checkpoint(path: Path, args: argparse.Namespace, device: torch.device) -> dict:
    try:
        checkpoint = torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError:
        raise UserError(f"--resume: there is no checkpoint at {path}") from None
    except Exception as error:  # torch.load raises many kinds of errors for a damaged file
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"--resume: {path} cannot be read as a checkpoint ({type(error).__name__}: {reason})"
        ) from error
    if not isinstance(checkpoint, dict) or checkpoint.get("format") != CHECKPOINT_FORMAT:
        raise UserError(f"--resume: {path} is not a checkpoint of this example")
    for flag, now, then in (
        ("--opt-level", args.opt_level, checkpoint["opt_level"]),
        ("--optimizer", args.optimizer, checkpoint["optimizer_name"]),
    ):
        if then != now:
            raise UserError(f"--resume: {path} was trained with {flag} {then}, this run has {now}; use {flag} {then}")
    if checkpoint["epoch"] >= args.epochs:
        done = checkpoint["epoch"]
        raise UserError(
            f"--resume: {path} has {done} epochs behind it and --epochs is {args.epochs}; ask for more than {done}"
        )
    return checkpoint


def load_checkpoint(checkpoint: dict, model, optimizer, schedule) -> None:
    """Loads after ``amp.initialize``, in any order. The model's state dict contains the fp32 masters."""
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    schedule.load_state_dict(checkpoint["schedule"])
    amp.load_state_dict(checkpoint["amp"])


# --- training ---------------------------------------------------------------------------------------------------------


def train(args: argparse.Namespace) -> dict[str, list]:
    device = pick_device(args.device)
    checkpoint = read_checkpoint(args.resume, args, device) if args.resume else None
    images, labels, test_images, test_labels = load_digits(device)
    steps = len(images) // args.batch_size
    if not steps:
        raise UserError(f"--batch-size: {args.batch_size} is more than the {len(images)} training images")

    torch.manual_seed(args.seed)
    model = make_model().to(device)
    make_optimizer, default_lr = OPTIMIZERS[args.optimizer]
    optimizer = make_optimizer(model.parameters(), args.lr or default_lr)
    options = {"loss_scale": args.loss_scale, "init_scale": args.first_loss_scale}
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level, **options)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.85)

    first_epoch, history = 0, {"loss": [], "loss_scale": [], "skipped": [], "accuracy": [], "epoch_end": []}
    if checkpoint is not None:
        load_checkpoint(checkpoint, model, optimizer, schedule)
        first_epoch, history = checkpoint["epoch"], checkpoint["history"]
        print(f"resumed {args.resume} after epoch {first_epoch}, test accuracy {history['accuracy'][-1]:.2f}%")

    done = len(history["loss"])
    total = done + (args.epochs - first_epoch) * steps
    # disable=None shows the bar only on a terminal
    with tqdm(desc=args.opt_level, initial=done, total=total, unit="step", disable=args.no_progress or None) as bar:
        for epoch in range(first_epoch, args.epochs):
            order = torch.randperm(len(images), generator=torch.Generator().manual_seed(args.seed + epoch)).to(device)
            losses = []
            for batch in order[: steps * args.batch_size].split(args.batch_size):
                loss = F.cross_entropy(model(images[batch]), labels[batch])
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
                clip_grad_norm_(amp.master_params(optimizer), args.max_norm)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
                bar.update()
            # Read once per epoch, so that no step needs a host sync.
            latest = amp.history(last=steps)
            history["loss"] += torch.stack(losses).tolist()
            history["loss_scale"] += latest.scale[0]
            history["skipped"] += latest.skipped
            schedule.step()
            history["accuracy"].append(accuracy(model, test_images, test_labels))
            history["epoch_end"].append(len(history["loss"]))
            bar.set_postfix(loss=f"{loss.item():.4f}", test=f"{history['accuracy'][-1]:.2f}%")
            if args.checkpoint:
                save_checkpoint(args.checkpoint, args, epoch + 1, history, model, optimizer, schedule)
    amp.reset()
    return history


def plot(history: dict[str, list], fp32: dict[str, list] | None, opt_level: str, path: Path) -> None:
    loss, scale = np.array(history["loss"]), np.array(history["loss_scale"])
    step, skipped = np.arange(1, len(loss) + 1), np.flatnonzero(history["skipped"]) + 1
    window = max(1, len(loss) // 50)
    later = step[: len(loss) - window + 1] + window // 2
    smooth = partial(np.convolve, np.ones(window) / window, mode="valid")
    figure = Figure(figsize=(9, 6), dpi=120, layout="constrained")
    figure.suptitle(f"UCI digits at {opt_level}: test accuracy {history['accuracy'][-1]:.2f}%", weight="bold")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))

    top.semilogy(step, loss, color="tab:blue", alpha=0.25, linewidth=0.8, label="training loss")
    top.semilogy(later, smooth(np.nan_to_num(loss)), color="tab:blue", label=f"mean of {window} steps")
    top.set_ylabel("training loss", color="tab:blue")
    right = top.twinx()
    right.plot(history["epoch_end"], history["accuracy"], "o-", color="tab:green", markersize=4, label="test accuracy")
    if fp32:
        top.semilogy(later, smooth(fp32["loss"]), ":", color="tab:blue", label="the same in fp32")
        right.plot(fp32["epoch_end"], fp32["accuracy"], "o:", color="tab:green", markersize=4, label="in fp32")
    right.set_ylabel("test accuracy (%)", color="tab:green")
    right.set_ylim(min(90.0, *history["accuracy"], *(fp32 or history)["accuracy"]) - 0.5, 100.5)
    right.legend(handles=[*top.get_lines(), *right.get_lines()], loc="lower left")

    bottom.step(step, scale, where="post", color="tab:orange", linewidth=2, label="loss scale")
    label = f"skipped steps: {len(skipped)} of {len(step)}"
    bottom.plot(skipped, scale[skipped - 1], "x", color="tab:red", markersize=8, markeredgewidth=2, label=label)
    bottom.set_yscale("log", base=2)
    bottom.set_ylim(scale.min() / 2, scale.max() * 4)
    bottom.set(xlabel="step", ylabel="loss scale")
    bottom.legend(loc="upper right")
    for axis in (top, bottom):
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    right.spines["top"].set_visible(False)
    figure.savefig(path, format="png")


# --- command line -----------------------------------------------------------------------------------------------------


def pick_device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device: cuda was asked for and torch finds no CUDA device here; use --device cpu")
    # Operations this small gain nothing from a second thread, and lose much where the cores are busy.
    torch.set_num_threads(1)
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def positive(kind: type):
    def parse(text: str):
        value = kind(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return value

    parse.__name__ = kind.__name__
    return parse


def loss_scale(text: str) -> float | str:
    return text if text == "dynamic" else positive(float)(text)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--opt-level", default="O1", choices=["O0", "O1", "O2", "O3", "O4", "O5"], help="default O1")
    parser.add_argument("--optimizer", default="FusedSGD", choices=list(OPTIMIZERS), help="default FusedSGD")
    parser.add_argument("--epochs", type=positive(int), default=3, help="in all, also when resuming; default 3")
    parser.add_argument("--batch-size", type=positive(int), default=16, help="default 16")
    parser.add_argument("--lr", type=positive(float), help="in the first epoch; the default depends on the optimizer")
    parser.add_argument("--max-norm", type=positive(float), default=2.0, help="gradient norm to clip at; default 2")
    parser.add_argument("--loss-scale", type=loss_scale, help='a number or "dynamic"; default: of the opt level')
    parser.add_argument("--first-loss-scale", type=positive(float), help="of a dynamic loss scale; default 2^24")
    parser.add_argument("--alone", action="store_true", help="do not train in fp32, too, as --resume does not")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, metavar="PATH", help="file to write after every epoch")
    parser.add_argument("--resume", type=Path, metavar="PATH", help="checkpoint to resume from")
    parser.add_argument(
        "--output-dir", type=Path, default=Path(), metavar="DIR", help="folder for the plot; default: this one"
    )
    parser.add_argument("--plot", type=Path, metavar="PATH", help="default digits.png in --output-dir")
    parser.add_argument("--no-progress", action="store_true", help="hide the progress bar")
    args = parser.parse_args()
    args.plot = args.plot or args.output_dir / "digits.png"
    if (args.loss_scale or DEFAULT_LOSS_SCALE[args.opt_level]) == "dynamic":
        args.first_loss_scale = args.first_loss_scale or 2.0**24
    elif args.first_loss_scale:
        parser.error("--first-loss-scale needs a dynamic loss scale; add --loss-scale dynamic")
    return args


def main() -> int:
    args = parse_args()
    try:
        for option, path in (("--plot", args.plot), ("--checkpoint", args.checkpoint)):
            if path is not None and (path.is_dir() or not path.parent.is_dir()):
                raise UserError(f"{option}: {path} cannot be written: it is a directory or lies in none")
        with logging_redirect_tqdm():  # prints amp's log above the bar
            history = train(args)
            alone = args.alone or args.resume or args.opt_level == "O0"
            fp32 = None if alone else train(argparse.Namespace(**vars(args) | FP32))
    except UserError as error:
        print(f"digits.py: error: {error}", file=sys.stderr)
        return 2
    code = 0
    try:
        plot(history, fp32, args.opt_level, args.plot)
        print(f"plot written to {args.plot}")
    except OSError as error:
        print(f"digits.py: error: --plot: {args.plot} cannot be written: {error.strerror}", file=sys.stderr)
        code = 1
    skipped, scale = sum(history["skipped"]), history["loss_scale"][-1]
    in_fp32 = f", in fp32 {fp32['accuracy'][-1]:.2f}%" if fp32 else ""
    print(
        f"test accuracy {history['accuracy'][-1]:.2f}%{in_fp32} | loss scale {scale:g} | "
        f"skipped steps {skipped} of {len(history['skipped'])}"
    )
    return code


if __name__ == "__main__":
    sys.exit(main())
