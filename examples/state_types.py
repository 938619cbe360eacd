"""Trains a character GPT with optimizer state in fp32, in bf16 and in 8-bit codes, and compares loss and memory.

    python examples/state_types.py                          # three runs from the same weights, on the same batches
    python examples/state_types.py --plot state_types.png   # and draw the three curves and their memory

The gradients of the first steps are ten times as large as those of the rest. An average of squares that could not
shrink would stay too large and slow the rest down; rounding at random lets it shrink as in fp32.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from char_lm import GPT, Text, bits_per_char, loss_of, positive
from matplotlib.figure import Figure
from torch import Tensor, nn
from tqdm import tqdm

from ampctx import amp
from ampctx.optimizers import FusedAdam

STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": "8bit"}
Curve = list[tuple[int, float]]


def bytes_of_state(optimizer: torch.optim.Optimizer) -> int:
    """The memory that the optimizer's state takes, without step counts."""
    tensors = (t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor) and t.dim())
    return sum(t.numel() * t.element_size() for t in tensors)


def train(args: argparse.Namespace, text: Text, device: torch.device, kind: str) -> tuple[nn.Module, FusedAdam, Curve]:
    """Trains with one kind of state. Returns the model, its optimizer and (step, held-out bits per char)."""
    torch.manual_seed(args.seed)
    model = GPT(len(text.alphabet), args.context, args.width, args.layers, heads=args.width // 32).to(device)
    optimizer = FusedAdam(
        model.parameters(), lr=args.lr, betas=(0.9, 0.999), weight_decay=0.05,
        state_dtype=STATE_DTYPES[kind], min_8bit_size=args.min_8bit_size, seed=args.seed,
    )  # fmt: skip
    session = amp.AmpSession()  # each run has its own
    model, optimizer = session.initialize(model, optimizer, opt_level=args.opt_level)
    generator = torch.Generator().manual_seed(args.seed)
    curve = []
    for step in tqdm(range(1, args.steps + 1), desc=kind, unit="step", disable=args.no_progress or None):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, step / (0.05 * args.steps)) * (1 - 0.95 * step / args.steps)
        factor = 10.0 if step <= args.large_steps else 1.0
        loss = factor * loss_of(model, *text.batch(args.batch_size, args.context, generator))
        with session.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % args.eval_every == 0 or step == args.steps:
            curve.append((step, bits_per_char(model, text.test, args.context)))
    session.reset()
    return model, optimizer, curve


def plot(curves: dict[str, Curve], memory: dict[str, float], path: Path) -> None:
    figure = Figure(figsize=(9, 4.5), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 1))
    for kind, curve in curves.items():
        left.plot(*zip(*curve, strict=True), "o-", markersize=3, label=f"{kind} state")
    left.set(xlabel="step", ylabel="held-out bits per character")
    left.legend()
    left.grid(alpha=0.3)
    right.bar([*memory], [*memory.values()], color=[f"C{i}" for i in range(len(memory))])
    right.set(ylabel="bytes of state per parameter")
    for i, value in enumerate(memory.values()):
        right.text(i, value, f"{value:.2f}", ha="center", va="bottom")
    figure.savefig(path, format="png")


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--opt-level", default="O0", choices=["O0", "O1", "O2", "O4", "O5"], help="default O0")
    parser.add_argument("--steps", type=positive, default=1000, help="optimizer steps of each run; default 1000")
    parser.add_argument("--large-steps", type=int, default=100, help="first steps with large gradients; default 100")
    parser.add_argument("--batch-size", type=positive, default=16, help="default 16")
    parser.add_argument("--context", type=positive, default=32, help="characters that the model sees; default 32")
    parser.add_argument("--width", type=positive, default=64, help="a multiple of 32; default 64")
    parser.add_argument("--layers", type=positive, default=2, help="default 2")
    parser.add_argument("--lr", type=float, default=3e-3, help="highest learning rate; default 0.003")
    parser.add_argument("--min-8bit-size", type=int, default=4096, help="smaller parameters keep fp32; default 4096")
    parser.add_argument("--eval-every", type=positive, default=100, help="steps between evaluations; default 100")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw loss and memory into this PNG")
    parser.add_argument("--no-progress", action="store_true", help="hide the progress bars")
    args = parser.parse_args(arguments)
    if args.width % 32:
        parser.error(f"--width: {args.width} is not a multiple of 32, the width of one attention head")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: cuda was asked for and torch finds no CUDA device here; use --device cpu")
    if args.plot and (args.plot.is_dir() or not args.plot.parent.is_dir()):
        parser.error(f"--plot: {args.plot} cannot be written: it is a directory or lies in none")
    return args


def main() -> int:
    args = parse_args()
    # Ops this small gain little from a second thread, and lose much on busy cores.
    torch.set_num_threads(1)
    device = torch.device("cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu")
    text, curves, memory = Text(device), {}, {}
    for kind in STATE_DTYPES:
        model, optimizer, curves[kind] = train(args, text, device, kind)
        memory[kind] = bytes_of_state(optimizer) / sum(p.numel() for p in model.parameters())
    if args.plot:
        plot(curves, memory, args.plot)
        print(f"plot written to {args.plot}")
    for kind, curve in curves.items():
        print(f"{kind} state: held-out bits per char {curve[-1][1]:.3f} | {memory[kind]:.2f} bytes per parameter")
    return 0


if __name__ == "__main__":
    sys.exit(main())
