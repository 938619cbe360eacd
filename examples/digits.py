"""Trains a small convolutional net on the UCI handwritten digits in mixed precision, with apex's loop.

    python examples/digits.py                                   # O1: fp32 weights, fp16 where it suits; seconds
    python examples/digits.py --opt-level O2                    # fp16 model, fp32 batch norm and master weights
    python examples/digits.py --checkpoint digits.pt            # saves after every epoch; --resume digits.pt goes on

A dynamic loss scale starts far too high, so that the first steps are skipped. Then the net trains in fp32, too. A plot
(digits.png) has loss, loss scale and skipped steps over time.
"""

import os
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from shared import Parser, accuracy, batches, load_digits, make_model, plot, progress, writable

from ampctx import amp, clip_grad_norm_, optimizers

CHECKPOINT_FORMAT = "ampctx-digits-3"
BATCH, MAX_NORM = 16, 2.0
# The optimizer, with the learning rate of its first epoch.
OPTIMIZERS = {
    "FusedSGD": partial(optimizers.FusedSGD, lr=0.05, momentum=0.9, weight_decay=5e-4),
    "FusedAdam": partial(optimizers.FusedAdam, lr=0.005, weight_decay=5e-4),
    "FusedLAMB": partial(optimizers.FusedLAMB, lr=0.005, weight_decay=5e-4),
    "FusedNovoGrad": partial(optimizers.FusedNovoGrad, lr=0.1, weight_decay=5e-4),
    "FusedAdagrad": partial(optimizers.FusedAdagrad, lr=0.02, weight_decay=5e-4),
    "SGD": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=5e-4),
}


def refuse(reason: str) -> None:
    """Ends the program with one line on stderr."""
    print(f"digits.py: error: {reason}", file=sys.stderr)
    sys.exit(2)


def save_checkpoint(path: Path, args, epoch, history, model, optimizer, schedule) -> None:
    """Writes a temporary file and renames it, so that a crash leaves the previous checkpoint intact."""
    checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}
    checkpoint |= {"schedule": schedule.state_dict(), "epoch": epoch, "history": history}
    checkpoint |= {"format": CHECKPOINT_FORMAT, "opt_level": args.opt_level, "optimizer_name": args.optimizer}
    part = path.with_name(path.name + ".part")
    torch.save(checkpoint, part)
    os.replace(part, path)


def read_checkpoint(path: Path, args) -> dict:
    try:
        checkpoint = torch.load(path, map_location=args.device, weights_only=True)
    except Exception as error:  # torch.load raises many kinds of errors
        reason = str(error).partition("\n")[0]
        refuse(f"--resume: {path} cannot be read as a checkpoint ({type(error).__name__}: {reason})")
    if not isinstance(checkpoint, dict) or checkpoint.get("format") != CHECKPOINT_FORMAT:
        refuse(f"--resume: {path} is not a checkpoint of this example")
    then, now = (checkpoint["opt_level"], checkpoint["optimizer_name"]), (args.opt_level, args.optimizer)
    if then != now:
        refuse(f"--resume: {path} was trained at {' with '.join(then)}, and this run is at {' with '.join(now)}")
    done = checkpoint["epoch"]
    if done >= args.epochs:
        refuse(f"--resume: {path} has {done} epochs behind it and --epochs is {args.epochs}; ask for more than {done}")
    return checkpoint


def load_checkpoint(checkpoint: dict, model, optimizer, schedule) -> None:
    """Loads after ``amp.initialize``, in any order. The model's state dict contains the fp32 masters."""
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    schedule.load_state_dict(checkpoint["schedule"])
    amp.load_state_dict(checkpoint["amp"])


def train(args, opt_level: str, checkpoint: dict | None = None) -> dict[str, list]:
    images, labels, test_images, test_labels = load_digits(args.device)
    torch.manual_seed(0)
    model = make_model().to(args.device)
    optimizer = OPTIMIZERS[args.optimizer](model.parameters())
    first_scale = args.first_loss_scale if opt_level in ("O1", "O2") else None
    model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level, init_scale=first_scale)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.85)

    first_epoch, history = 0, {"loss": [], "loss_scale": [], "skipped": [], "accuracy": [], "epoch_end": []}
    if checkpoint is not None:
        load_checkpoint(checkpoint, model, optimizer, schedule)
        first_epoch, history = checkpoint["epoch"], checkpoint["history"]
        print(f"resumed {args.resume} after epoch {first_epoch}, test accuracy {history['accuracy'][-1]:.2f}%")

    for epoch in progress(range(first_epoch, args.epochs), f"epochs at {opt_level}"):
        losses = []
        for inputs, targets in batches(images, labels, BATCH, seed=epoch):
            loss = F.cross_entropy(model(inputs), targets)
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            clip_grad_norm_(amp.master_params(optimizer), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        # Read once per epoch, so that no step needs a host sync.
        latest = amp.history(last=len(losses))
        history["loss"] += torch.stack(losses).tolist()
        history["loss_scale"] += latest.scale[0]
        history["skipped"] += latest.skipped
        schedule.step()
        history["accuracy"].append(accuracy(model, test_images, test_labels))
        history["epoch_end"].append(len(history["loss"]))
        if args.checkpoint:
            save_checkpoint(args.checkpoint, args, epoch + 1, history, model, optimizer, schedule)
    amp.reset()
    return history


def draw(history: dict[str, list], fp32: dict[str, list] | None, opt_level: str, path: Path) -> None:
    loss, scale = np.array(history["loss"]), np.array(history["loss_scale"])
    step, skipped = np.arange(1, len(loss) + 1), np.flatnonzero(history["skipped"]) + 1
    window = max(1, len(loss) // 50)
    later = step[: len(loss) - window + 1] + window // 2
    smooth = partial(np.convolve, np.ones(window) / window, mode="valid")
    with plot(path, rows=2, sharex=True, height_ratios=(3, 2)) as (top, bottom):
        title = f"UCI digits at {opt_level}: test accuracy {history['accuracy'][-1]:.2f}%"
        top.semilogy(step, loss, color="tab:blue", alpha=0.25, linewidth=0.8, label="training loss")
        top.semilogy(later, smooth(np.nan_to_num(loss)), color="tab:blue", label=f"mean of {window} steps")
        top.set(title=title, ylabel="training loss")
        right = top.twinx()
        right.plot(history["epoch_end"], history["accuracy"], "o-", color="tab:green", label="test accuracy")
        if fp32:
            top.semilogy(later, smooth(fp32["loss"]), ":", color="tab:blue", label="the same in fp32")
            right.plot(fp32["epoch_end"], fp32["accuracy"], "o:", color="tab:green", label="in fp32")
        lowest = min(90.0, *history["accuracy"], *(fp32 or history)["accuracy"])
        right.set(ylabel="test accuracy (%)", ylim=(lowest - 0.5, 100.5))
        right.legend(handles=[*top.get_lines(), *right.get_lines()], loc="lower left")

        bottom.step(step, scale, where="post", color="tab:orange", linewidth=2, label="loss scale")
        label = f"skipped steps: {len(skipped)} of {len(step)}"
        bottom.plot(skipped, scale[skipped - 1], "x", color="tab:red", markersize=8, markeredgewidth=2, label=label)
        bottom.set_yscale("log", base=2)
        bottom.set(xlabel="step", ylabel="loss scale", ylim=(scale.min() / 2, scale.max() * 4))
        bottom.legend(loc="upper right")


def main() -> None:
    parser = Parser(__doc__, opt_level="O1", epochs=3)
    parser.add_argument("--optimizer", default="FusedSGD", choices=list(OPTIMIZERS), help="default FusedSGD")
    parser.add_argument("--first-loss-scale", type=float, default=2**24, help="at O1 and O2; default 2^24")
    parser.add_argument("--alone", action="store_true", help="do not train in fp32, too, as --resume does not")
    parser.add_argument("--checkpoint", type=writable, metavar="PATH", help="file to write after every epoch")
    parser.add_argument("--resume", type=Path, metavar="PATH", help="checkpoint to resume from")
    parser.add_argument("--plot", type=writable, default="digits.png", metavar="PATH", help="default digits.png")
    args = parser.parse_args()
    history = train(args, args.opt_level, read_checkpoint(args.resume, args) if args.resume else None)
    args.checkpoint = None
    fp32 = None if args.alone or args.resume or args.opt_level == "O0" else train(args, "O0")
    skipped, scale = sum(history["skipped"]), history["loss_scale"][-1]
    in_fp32 = f", in fp32 {fp32['accuracy'][-1]:.2f}%" if fp32 else ""
    scaling = f"loss scale {scale:g} | skipped steps {skipped} of {len(history['skipped'])}"
    print(f"test accuracy {history['accuracy'][-1]:.2f}%{in_fp32} | {scaling}")
    draw(history, fp32, args.opt_level, args.plot)


if __name__ == "__main__":
    main()
