"""Two reports of the same benchmark beside each other, such as those of two commits.

    python benchmarks/compare.py OLD.json NEW.json [--fail-on-regression PERCENT]

OLD and NEW may be folders: what both have by the same name is compared. A time counts as changed where the quartiles of
the two do not touch: "slower", "faster". Times of different machines say nothing about the code; the ratio to a peer
does, so that is shown as well. With --fail-on-regression the exit code is 1 where a time of ampctx is slower by more
than so many percent.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Row:
    """Medians in ms of one side of one case; ``change`` is new by old."""

    name: str
    side: str
    old: float
    new: float
    verdict: str
    ratios: tuple[float, float] | None

    @property
    def change(self) -> float:
        return self.new / self.old


def rows(name: str, old: dict[str, Any], new: dict[str, Any]) -> Iterator[Row]:
    """A row for each side that both reports have."""
    for case, of_case in old["cases"].items():
        others = new["cases"].get(case, {"sides": {}})["sides"]
        for who, side in of_case["sides"].items():
            if who not in others:
                continue
            before, after = side["ms"], others[who]["ms"]
            verdict = "slower" if after["q1"] > before["q3"] else "faster" if after["q3"] < before["q1"] else ""
            ratios = None
            if "over_ampctx" in side:
                ratios = (side["over_ampctx"]["median"], others[who]["over_ampctx"]["median"])
            yield Row(f"{name} {case}", who, before["median"], after["median"], verdict, ratios)


def table(found: list[Row]) -> str:
    width = max(len(row.name) for row in found)
    lines = [
        f"{'':{width}}  {'':26}{'old, ms':>10}{'new, ms':>10}{'new/old':>9}          {'/ ampctx, old and new':>22}"
    ]
    for row in found:
        ratios = f"{row.ratios[0]:11.2f}{row.ratios[1]:11.2f}" if row.ratios else ""
        line = (
            f"{row.name:{width}}  {row.side:26}{row.old:10.3f}{row.new:10.3f}{row.change:9.3f}  {row.verdict:8}{ratios}"
        )
        lines.append(line.rstrip())
    return "\n".join(lines)


def pairs(old: Path, new: Path) -> list[tuple[str, Path, Path]]:
    if old.is_dir() != new.is_dir():
        raise ValueError(f"{old} and {new} are a folder and a file")
    if not old.is_dir():
        return [(new.stem, old, new)]
    return [(path.stem, path, new / path.name) for path in sorted(old.glob("*.json")) if (new / path.name).exists()]


def load(path: Path) -> dict[str, Any]:
    report = json.loads(path.read_text())
    return report if isinstance(report, dict) else {}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--fail-on-regression", type=float, metavar="PERCENT")
    args = parser.parse_args(arguments)
    found: list[Row] = []
    try:
        for name, *paths in pairs(args.old, args.new):
            old, new = map(load, paths)
            if "cases" not in old or "cases" not in new:
                if args.old.is_dir():
                    continue  # a report of something else
                parser.error(f"{paths['cases' in old]} is no report of a benchmark: it has no cases")
            found += rows(name, old, new)
            for key in ("machine", "versions"):
                now, then = ({k: v for k, v in r[key].items() if k != "load_before"} for r in (new, old))
                if now != then:
                    print(f"{name}: another {key}: {then} and {now}")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if not found:
        parser.error(f"{args.old} and {args.new} have no case in common")
    print(table(found))
    limit = args.fail_on_regression
    if limit is None:
        return 0
    bad = [r for r in found if r.side == "ampctx" and r.verdict == "slower" and r.change > 1 + limit / 100]
    for row in bad:
        print(f"{row.name}: slower by {row.change - 1:.1%}, more than {limit:g}%")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
