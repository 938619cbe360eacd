"""Puts the counts of a long run into a CSV of figures, such as benchmarks/results/figures.csv."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))
import measuring  # noqa: E402


def write(path: Path, report: str, counts: dict[str, int]) -> None:
    script, *arguments = sys.argv
    place = arguments.index("--csv")
    command = " ".join(["python", os.path.relpath(script, ROOT), *arguments[:place], *arguments[place + 2 :]])
    found = {f"all/{name}": count for name, count in counts.items()}
    measuring.write(path, measuring.rows(report, found, "cpu", command))
