"""Host time per tensor: the tail of a training step over tensors of one element, where nothing else is left to time.

    python benchmarks/host.py --opt-level O1 --tensors 161,1000,5000,20000 --csv host.csv

Timed by a clock of the host, which does not wait for a GPU: entering ``scale_loss``, leaving it, with ``--clip``
clipping, and the step; for the peers ``GradScaler.scale``, and the rest as tail.py has it. ``zero_grad`` is shown,
too. ``--flush`` empties the caches before entry and before exit, as forward and backward do.
"""

from __future__ import annotations

import argparse
import sys

from measuring import Clock, Figures, add_against, figures, interleave, options, parse, report
from networks import weights
from peers import OPTIMIZERS
from tail import LOW_PRECISION, Tails, peers_of

NAMED = ("device", "opt_level")


def measure(tails: Tails, args: argparse.Namespace, tensors: int) -> Figures:
    clock = Clock(tails.device, host=True, flush=args.flush)

    def step(who: str, round_number: int) -> dict[str, float]:
        found = tails.step(who, round_number, clock)
        return {"time": sum(found.values()) - found["zero_grad"], **found}

    samples = interleave(tails.sides, step, args.rounds)
    tails.check()
    return figures(f"{tensors} tensors", samples)


def parser() -> argparse.ArgumentParser:
    found = options(__file__, __doc__)
    found.add_argument("--opt-level", default="O1", choices=list(LOW_PRECISION))
    found.add_argument("--optimizer", default="FusedAdam", choices=OPTIMIZERS)
    found.add_argument("--clip", action="store_true", help="clip the norm of the gradients")
    several = lambda text: tuple(map(int, text.split(",")))  # noqa: E731
    found.add_argument("--tensors", type=several, default=(161, 1000, 5000, 20000), metavar="N,...")
    found.add_argument("--flush", action="store_true", help="empty the caches before entry and before exit")
    add_against(found)
    return found


def main(arguments: list[str] | None = None) -> None:
    args = parse(options := parser(), arguments)
    peers, found = peers_of(options, args.optimizer, args), Figures()
    for tensors in args.tensors:
        tails = Tails(lambda n=tensors: weights([(1,)] * n), args, peers)
        found |= measure(tails, args, tensors)
        tails.close()
    report(options, args, found, *NAMED)


if __name__ == "__main__":
    sys.exit(main())
