"""Two CSVs of figures beside each other, such as those of two commits.

    python benchmarks/compare.py OLD.csv NEW.csv [--fail-on-regression PERCENT]

Times of different machines say nothing about the code; ratios to another side do. With --fail-on-regression the exit
code is 1 where a time of ampctx is slower by more than so many percent.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from measuring import read


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--fail-on-regression", type=float, metavar="PERCENT")
    args = parser.parse_args(arguments)
    try:
        old, new = read(args.old), read(args.new)
    except (OSError, TypeError, KeyError) as error:
        parser.error(f"no CSV of figures: {error}")
    both = [figure for figure in new if figure in old]
    if not both:
        parser.error(f"{args.old} and {args.new} have no figure in common")
    for machines in sorted({(old[figure].machine, new[figure].machine) for figure in both}):
        if machines[0] != machines[1]:
            print(f"another machine: {machines[0]} and {machines[1]}")
    slower = []
    for figure in both:
        before, after = float(old[figure].value), float(new[figure].value)
        change = after / before if before else float("nan")
        print(f"{figure:90} {before:10.4g} {after:10.4g} {old[figure].unit:4} {change:8.3f}")
        limit = args.fail_on_regression
        if limit is not None and figure.endswith("/ampctx/time") and after > before * (1 + limit / 100):
            slower.append(f"{figure}: slower by {after / before - 1:.1%}, more than {limit:g}%")
    print("\n".join(slower))
    return min(len(slower), 1)


if __name__ == "__main__":
    sys.exit(main())
