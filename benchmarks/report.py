"""Writes the tables of docs/performance.md from the reports in benchmarks/results.

    python benchmarks/report.py

Only what lies between the marks of the page is written; the text around it is the page's own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"
MARKED = re.compile(r"(<!-- ([a-z]+): python benchmarks/report.py -->\n).*?(<!-- end of \2 -->)", re.S)

Reports = dict[str, dict[str, Any]]


def reports(folder: Path, kind: str = "*") -> Reports:
    """The benchmarks' reports in a folder by name, of one script or of all."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob(f"{kind}-*.json"))}
    return {name: report for name, report in found.items() if "cases" in report}


@dataclass(frozen=True)
class Goal:
    """``at_least``: of the ratio to ``side``; ``at_most``: of ampctx's microseconds per tensor."""

    name: str
    what: str
    file: str
    case: str
    side: str = "ampctx"
    at_least: float | None = None
    at_most: float | None = None


def _tail_goal(name: str, level: str, model: str, clip: bool, side: str, at_least: float) -> Goal:
    what = f"{level} tail{' with clipping' if clip else ''}, {model}, {side}"
    file = f"tail-cpu-{model}-{level}-FusedAdam{'-clip' if clip else ''}"
    return Goal(name, what, file, "tail", side, at_least)


GOALS = (
    Goal("C1", "`GradScaler.unscale_`, resnet50", "ops-cpu-resnet50", "unscale", "torch", 1.25),
    Goal("C1", "`GradScaler.unscale_`, tiny5000", "ops-cpu-tiny5000", "unscale", "torch", 5.0),
    _tail_goal("C2", "O1", "resnet50", False, "torch-fused", 1.2),
    _tail_goal("C2", "O1", "tiny5000", False, "torch-fused", 6.0),
    _tail_goal("C2", "O1", "resnet50", True, "torch-fused", 1.8),
    _tail_goal("C2", "O1", "tiny5000", True, "torch-fused", 9.0),
    _tail_goal("C2", "O1", "resnet50", False, "torch-default", 4.0),
    _tail_goal("C2", "O1", "tiny5000", False, "torch-default", 20.0),
    _tail_goal("C3", "O2", "resnet50", False, "torch-fused", 1.9),
    _tail_goal("C3", "O2", "tiny5000", False, "torch-fused", 7.0),
    Goal("C4", "cast of fp32 to fp16, resnet50", "ops-cpu-resnet50", "cast fp32 to fp16", "torch", 0.95),
    *(
        goal
        for n in (161, 1000, 5000, 20000)
        for goal in (
            Goal("G8", f"host time per tensor, {n:,} tensors", "host-cpu-O1", f"{n} tensors", at_most=0.3),
            Goal("G8", f"the same, torch-fused by ampctx, {n:,}", "host-cpu-O1", f"{n} tensors", "torch-fused", 10.0),
        )
    ),
)


def _row(*cells: Any) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def _head(*cells: str) -> list[str]:
    return [_row(*cells), _row(*("---" for _ in cells))]


def _link(name: str) -> str:
    return f"[{name}](../benchmarks/results/{name}.json)"


def _spread(of: dict[str, Any], digits: int = 2) -> str:
    return f"{of['median']:.{digits}f} ({of['q1']:.{digits}f} to {of['q3']:.{digits}f})"


def verdict(goal: Goal, found: Reports) -> tuple[str, str, str]:
    """What was asked, what was measured, and whether that is enough."""
    asked = f"at most {goal.at_most:g} us" if goal.at_least is None else f"at least {goal.at_least:g}"
    case = found.get(goal.file, {"cases": {}})["cases"].get(goal.case)
    if case is None or goal.side not in case["sides"]:
        return asked, "not recorded", ""
    side = case["sides"][goal.side]
    if goal.at_least is None:
        value = side["us_per_tensor"]
        missed = "" if value <= goal.at_most else f"missed, {value / goal.at_most:.1f} times as much"
        return asked, f"{value:.3g} us", missed or "reached"
    value = side["over_ampctx"]["median"]
    missed = "" if value >= goal.at_least else f"missed by {1 - value / goal.at_least:.0%}"
    return asked, _spread(side["over_ampctx"]), missed or "reached"


def goals(found: Reports) -> Iterator[str]:
    yield from _head("goal", "of", "asked", "measured (quartiles)", "", "runs", "from")
    for goal in GOALS:
        asked, measured, enough = verdict(goal, found)
        runs = found.get(goal.file, {}).get("runs", "")
        yield _row(goal.name, goal.what, asked, measured, enough, runs, _link(goal.file) if enough else goal.file)


def cases(found: Reports, kind: str) -> Iterator[str]:
    yield from _head("report", "case", "side", "ms (quartiles)", "time by ampctx's (quartiles)", "of the floor")
    for name, report in found.items():
        if report["benchmark"] != kind:
            continue
        for case, of_case in report["cases"].items():
            for who, side in of_case["sides"].items():
                own = who == "ampctx"
                ratio = "" if own else _spread(side["over_ampctx"])
                share = f"{side['share_of_floor']:.0%}" if "share_of_floor" in side else ""
                shown = f"ampctx, {side['what']}" if own else f"{who}: {side['what']}"
                yield _row(_link(name) if own else "", case if own else "", shown, _spread(side["ms"]), ratio, share)


def host(found: Reports) -> Iterator[str]:
    yield from _head("report", "tensors", "side", "us per tensor", "ms (quartiles)", "of that (median)")
    for name, report in found.items():
        if report["benchmark"] != "host":
            continue
        for case in report["cases"].values():
            for who, side in case["sides"].items():
                own = who == "ampctx"
                parts = ", ".join(f"{part} {of['median']:.3g}" for part, of in side["parts_ms"].items())
                count = f"{case['tensors']:,}" if own else ""
                figure = f"{side['us_per_tensor']:.3g}"
                yield _row(_link(name) if own else "", count, who, figure, _spread(side["ms"], 3), parts)


def loop(found: Reports) -> Iterator[str]:
    yield from _head("report", "level", "side", "ms (quartiles)", "time by ampctx's (quartiles)", "peak MB", "held MB")
    for name, report in found.items():
        if report["benchmark"] != "loop":
            continue
        for level, case in report["cases"].items():
            for who, side in case["sides"].items():
                own = who == "ampctx"
                ratio = "" if own else _spread(side["over_ampctx"])
                memory = (f"{side[key]:.1f}" for key in ("peak_MB", "held_MB"))
                yield _row(_link(name) if own else "", level if own else "", who, _spread(side["ms"]), ratio, *memory)


def machines(found: Reports) -> Iterator[str]:
    yield from _head("report", "machine", "versions", "memory, GB/s: copy, in place", "commit", "command")
    for name, report in found.items():
        machine, versions = report["machine"], report["versions"]
        where = machine["gpu"] or f"{machine['cpu']}, {machine['cores']} cores, {machine['torch_threads']} threads"
        speeds = next((c["bandwidth_GB_per_s"] for c in report["cases"].values() if "bandwidth_GB_per_s" in c), {})
        speed = ", ".join(f"{of['median']:.1f}" for of in speeds.values())
        shown = f"torch {versions['torch']}, Python {versions['python']}"
        load = f"load {machine['load_before']}"
        commit, dash, dirty = (report["commit"] or "unknown").partition("-")
        yield _row(_link(name), f"{where}, {load}", shown, speed, commit[:12] + dash + dirty, f"`{report['command']}`")


PARTS = {
    "goals": goals,
    "tails": lambda found: cases(found, "tail"),
    "ops": lambda found: cases(found, "ops"),
    "host": host,
    "loop": loop,
    "machines": machines,
}


def replaced(page: str, found: Reports) -> str:
    """``page`` with every part between its marks as the reports have it.

    Raises:
        ValueError: the page lacks the marks of a part.
    """
    marked = [match[2] for match in MARKED.finditer(page)]
    if sorted(marked) != sorted(PARTS):
        raise ValueError(f"the page has marks for {', '.join(marked) or 'nothing'}; expected {', '.join(PARTS)}")

    def fill(match: re.Match[str]) -> str:
        return f"{match[1]}\n" + "\n".join(PARTS[match[2]](found)) + f"\n\n{match[3]}"

    return MARKED.sub(fill, page)


def main() -> None:
    PAGE.write_text(replaced(PAGE.read_text(), reports(RESULTS)))


if __name__ == "__main__":
    main()
