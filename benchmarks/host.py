"""Host time per tensor: the tail of a training step over tensors of one element, where nothing else is left to time.

    python benchmarks/host.py --opt-level O1 --tensors 161,1000,5000,20000 --json host.json

Timed by the wall clock, on a GPU without waiting for it: entering ``scale_loss``, leaving it, with ``--clip`` clipping,
and the step; for the peers ``GradScaler.scale``, and the rest as tail.py has it. What backward and ``zero_grad`` take
is not counted; ``zero_grad`` is shown beside it. ``--flush`` empties the caches before entry and before exit, as
forward and backward do.

"us per further tensor" is the time above that of the fewest tensors, by the number of tensors above it: what an
iteration takes once for any number of tensors drops out.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import Any

from measuring import Clock, add_against, case, interleave, options, parse, report
from peers import OPTIMIZERS
from shapes import one_element
from tail import LOW_PRECISION, Tails, peers_of


def tensor_counts(text: str) -> tuple[int, ...]:
    counts = tuple(int(word) for word in text.split(","))
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{min(counts)} tensors are none")
    return counts


def measure(tails: Tails, args: argparse.Namespace, tensors: int) -> dict[str, Any]:
    clock = Clock(tails.device, host=True, flush=args.flush)

    def of(who: str) -> Callable[[int], dict[str, float]]:
        def step(round_number: int) -> dict[str, float]:
            found = tails.step(who, round_number, clock)
            return {"ms": sum(found.values()) - found["zero_grad"], **found}

        return step

    samples = interleave({who: of(who) for who in tails.sides}, args.rounds)
    found = case(samples, tails.what, tensors=tensors, elements=tensors, check=tails.check(args.rounds))
    for who, side in found["sides"].items():
        side["us_per_tensor"] = round(statistics.median(samples[who]["ms"]) * 1e3 / tensors, 4)
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = options(__file__, __doc__)
    parser.add_argument("--opt-level", default="O1", choices=list(LOW_PRECISION))
    parser.add_argument("--optimizer", default="FusedAdam", choices=OPTIMIZERS)
    parser.add_argument("--clip", action="store_true", help="clip the norm of the gradients")
    parser.add_argument("--tensors", type=tensor_counts, default=(161, 1000, 5000, 20000), metavar="N,...")
    parser.add_argument("--flush", action="store_true", help="empty the caches before entry and before exit")
    add_against(parser)
    args = parse(parser, arguments)
    peers = peers_of(parser, args.optimizer, args)
    cases = {}
    for tensors in args.tensors:
        tails = Tails(lambda n=tensors: one_element(n), args, args.optimizer, peers)
        cases[f"{tensors} tensors"] = measure(tails, args, tensors)
        tails.close()
    fewest = min(cases.values(), key=lambda case: case["tensors"])
    for found in cases.values():
        if further := found["tensors"] - fewest["tensors"]:
            for who, side in found["sides"].items():
                ms = side["ms"]["median"] - fewest["sides"][who]["ms"]["median"]
                side["us_per_further_tensor"] = round(ms * 1e3 / further, 4)
    report(parser, args, cases)


if __name__ == "__main__":
    sys.exit(main())
