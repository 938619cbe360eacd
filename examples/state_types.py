"""Trains a character GPT with optimizer state in fp32, in bf16 and in 8-bit codes, and compares loss and memory.

    python examples/state_types.py                          # three runs from the same weights, on the same batches

The gradients of the first steps are ten times as large as those of the rest. An average of squares that could not
shrink would stay too large and slow the rest down; rounding at random lets it shrink as in fp32.
"""

import torch
from char_lm import GPT, Text, bits_per_char, loss_of
from shared import LEVELS_OF_ADAM, Parser, plot, progress, writable
from torch import Tensor

from ampctx import amp
from ampctx.optimizers import FusedAdam

STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": "8bit"}


def bytes_of_state(optimizer: torch.optim.Optimizer) -> int:
    """The memory that the optimizer's state takes, without step counts."""
    tensors = (t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor) and t.dim())
    return sum(t.numel() * t.element_size() for t in tensors)


def train(args, text: Text, kind: str) -> tuple[GPT, FusedAdam, list[tuple[int, float]]]:
    """Trains with one kind of state. Returns the model, its optimizer and (step, held-out bits per char)."""
    torch.manual_seed(args.seed)
    model = GPT(len(text.alphabet), args.context, args.layers, args.heads).to(args.device)
    state = {"state_dtype": STATE_DTYPES[kind], "min_8bit_size": args.min_8bit_size, "seed": args.seed}
    optimizer = FusedAdam(model.parameters(), lr=args.lr, weight_decay=0.05, **state)
    session = amp.AmpSession()  # each run has its own
    model, optimizer = session.initialize(model, optimizer, opt_level=args.opt_level)
    generator = torch.Generator().manual_seed(args.seed)
    curve = []
    for step in progress(range(1, args.steps + 1), kind):
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


def main() -> None:
    sizes = {"batch_size": 16, "context": 32, "heads": 2, "layers": 2}
    parser = Parser(__doc__, opt_level="O0", levels=LEVELS_OF_ADAM, steps=1000, eval_every=100, **sizes)
    parser.add_argument("--lr", type=float, default=3e-3, help="highest learning rate; default 0.003")
    parser.add_argument("--large-steps", type=int, default=100, help="first steps with large gradients; default 100")
    parser.add_argument("--min-8bit-size", type=int, default=4096, help="smaller parameters keep fp32; default 4096")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=writable, metavar="PATH", help="draw loss and memory into this PNG")
    args = parser.parse_args()
    text, curves, memory = Text(args.device), {}, {}
    for kind in STATE_DTYPES:
        model, optimizer, curves[kind] = train(args, text, kind)
        memory[kind] = bytes_of_state(optimizer) / sum(p.numel() for p in model.parameters())
    if args.plot:
        with plot(args.plot, columns=2, size=(9, 4.5), width_ratios=(3, 1)) as (left, right):
            for kind, curve in curves.items():
                left.plot(*zip(*curve, strict=True), "o-", markersize=3, label=f"{kind} state")
            left.set(xlabel="step", ylabel="held-out bits per character")
            left.legend()
            right.bar_label(right.bar([*memory], [*memory.values()], color=["C0", "C1", "C2"]), fmt="%.2f")
            right.set(ylabel="bytes of state per parameter")
    for kind, curve in curves.items():
        print(f"{kind} state: held-out bits per char {curve[-1][1]:.3f} | {memory[kind]:.2f} bytes per parameter")


if __name__ == "__main__":
    main()
