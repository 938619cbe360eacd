"""Writes the measured figures of the docs from the reports in benchmarks/results.

    python benchmarks/report.py

``PAGES`` lists the pages and the parts of each. Only text between the marks of a part is written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
GAINS_PNG = "_static/gains.png"  # below docs/
MARKED = re.compile(r"(<!-- ([a-z]+): python benchmarks/report.py -->\n).*?(<!-- end of \2 -->)", re.S)

Reports = dict[str, dict[str, Any]]


def reports(folder: Path, kind: str = "*") -> Reports:
    """The benchmarks' reports in a folder by name, of one script or of all."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob(f"{kind}-*.json"))}
    return {name: report for name, report in found.items() if "cases" in report}


@dataclass(frozen=True)
class Goal:
    """``case`` and ``side`` are patterns that match all of a name; the worst of what they match counts. ``figure``: a
    ratio, ampctx's milliseconds or its microseconds per further tensor."""

    name: str
    what: str
    file: str
    case: str
    side: str = "ampctx"
    at_least: float | None = None
    at_most: float | None = None
    figure: str = "over_ampctx"


SMALL = (161, 1000, 5000, 20000)  # tensors of the "tiny" models
# By level and clipping: of the tiny models in the order of SMALL, and of ResNet-50.
_TAILS = {
    ("C2", "O1", False): (3.0, 3.0, 3.0, 2.8, 1.2),
    ("C2", "O1", True): (5.0, 5.0, 5.0, 4.0, 1.3),
    ("C3", "O2", False): (4.0, 4.0, 4.0, 3.8, 1.85),
    ("C3", "O2", True): (5.0, 5.0, 5.0, 5.0, 2.2),
}


def _tail_goals() -> Iterator[Goal]:
    for (name, level, clip), ratios in _TAILS.items():
        for model, at_least in zip((*(f"tiny{n}" for n in SMALL), "resnet50"), ratios, strict=True):
            what = f"step after backward at {level}{', clipped' if clip else ''}, {model}"
            file = f"tail-cpu-{model}-{level}-FusedAdam{'-clip' if clip else ''}"
            yield Goal(name, what, file, "tail", "torch-fused", at_least)


_FURTHER = "us_per_further_tensor"
GOALS = (
    Goal("C1", "`GradScaler.unscale_`, resnet50", "ops-cpu-resnet50", "unscale", "torch", 1.05),
    Goal("C1", "`GradScaler.unscale_`, tiny5000", "ops-cpu-tiny5000", "unscale", "torch", 2.0),
    *_tail_goals(),
    Goal("C4", "the slowest op against torch, resnet50", "ops-cpu-resnet50", ".*", "torch.*", 1.0),
    Goal("C4", "the slowest op against torch, tiny5000", "ops-cpu-tiny5000", ".*", "torch.*", 1.0),
    Goal("C4", "norm of fp16 against reading as much, resnet50", "ops-cpu-resnet50", "l2norm fp16", "read", 0.8),
    Goal("G8", "host time, 161 tensors", "host-cpu-O1", "161 tensors", at_most=0.15, figure="ms"),
    Goal("G8", "host time per further tensor, 1,000", "host-cpu-O1", "1000 tensors", at_most=0.6, figure=_FURTHER),
    Goal("G8", "the same, cold, 5,000", "host-cpu-O1-flush", "5000 tensors", at_most=1.5, figure=_FURTHER),
)


def _row(*cells: Any) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def _head(*cells: str) -> list[str]:
    return [_row(*cells), _row(*("---" for _ in cells))]


def _link(name: str, folder: str = "../benchmarks/results") -> str:
    return f"[{name}]({folder}/{name}.json)"


def _spread(of: dict[str, Any], digits: int = 2) -> str:
    return f"{of['median']:.{digits}f} ({of['q1']:.{digits}f} to {of['q3']:.{digits}f})"


def verdict(goal: Goal, found: Reports) -> tuple[str, str, str]:
    """The goal, the measured value, and whether that reaches the goal."""
    unit = {"over_ampctx": "", "ms": " ms"}.get(goal.figure, " us")
    asked = f"at least {goal.at_least:g}" if goal.at_least else f"at most {goal.at_most:g}{unit}"
    figures = {
        name: side[goal.figure]
        for name, case in found.get(goal.file, {"cases": {}})["cases"].items()
        for who, side in case["sides"].items()
        if re.fullmatch(goal.case, name) and re.fullmatch(goal.side, who) and goal.figure in side
    }
    if not figures:
        return asked, "not recorded", ""
    medians = {name: of["median"] if isinstance(of, dict) else of for name, of in figures.items()}
    worst = (min if goal.at_least else max)(medians, key=medians.__getitem__)
    value, of = medians[worst], figures[worst]
    shown = (f"{worst}: " if len(figures) > 1 else "") + (_spread(of) if isinstance(of, dict) else f"{of:.3g}") + unit
    if goal.at_least:
        return asked, shown, "reached" if value >= goal.at_least else f"missed by {1 - value / goal.at_least:.0%}"
    return asked, shown, "reached" if value <= goal.at_most else f"missed, {value / goal.at_most:.1f} times as much"


def _commit(report: dict[str, Any]) -> str:
    commit, dash, dirty = (report["commit"] or "unknown").partition("-")
    return commit[:12] + dash + dirty


def goals(found: Reports) -> Iterator[str]:
    yield from _head("goal", "compared", "goal value", "measured (quartiles)", "", "runs", "from")
    for goal in GOALS:
        asked, measured, enough = verdict(goal, found)
        runs = found.get(goal.file, {}).get("runs", "")
        source = _link(goal.file, "results") if enough else goal.file
        yield _row(goal.name, goal.what, asked, measured, enough, runs, source)


def cases(found: Reports, kind: str) -> Iterator[str]:
    yield from _head(
        "report", "case", "side", "ms (quartiles)", "time by ampctx's (quartiles)", "of the bandwidth bound"
    )
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
    yield from _head(
        "report", "tensors", "side", "us per tensor", "per further tensor", "ms (quartiles)", "of that (median)"
    )
    for name, report in found.items():
        if report["benchmark"] != "host":
            continue
        for case in report["cases"].values():
            for who, side in case["sides"].items():
                own = who == "ampctx"
                parts = ", ".join(f"{part} {of['median']:.3g}" for part, of in side["parts_ms"].items())
                count = f"{case['tensors']:,}" if own else ""
                figures = (f"{side[key]:.3g}" if key in side else "" for key in ("us_per_tensor", _FURTHER))
                yield _row(_link(name) if own else "", count, who, *figures, _spread(side["ms"], 3), parts)


def loop(found: Reports) -> Iterator[str]:
    yield from _head(
        "report", "level", "side", "ms (quartiles)", "time by ampctx's (quartiles)", "peak MB", "MB between steps"
    )
    for name, report in found.items():
        if report["benchmark"] != "loop":
            continue
        for level, case in report["cases"].items():
            for who, side in case["sides"].items():
                if level != "O0" and re.fullmatch("fp32, (?!torch-fused).*", who):
                    continue  # says no more than the rows of O0
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
        yield _row(_link(name), f"{where}, {load}", shown, speed, _commit(report), f"`{report['command']}`")


# --- docs/performance.md ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Comparisons that docs/performance.md draws and sums up: cases and sides, by patterns that match all of a name."""

    what: str
    file: str
    case: str
    side: str

    def ratios(self, found: Reports) -> list[float]:
        return [
            round(side["over_ampctx"]["median"], 2)
            for name, report in found.items()
            if re.fullmatch(self.file, name)
            for case, of_case in report["cases"].items()
            if re.fullmatch(self.case, case)
            for who, side in of_case["sides"].items()
            if re.fullmatch(self.side, f"{who}: {side['what']}")
        ]


_FUSED = r"torch-fused: torch\.opt.*"
GROUPS = (
    Group("step after backward, ResNet-50", "tail-cpu-resnet50-.*", "tail", _FUSED),
    Group("step after backward, small tensors", "tail-cpu-tiny.*", "tail", _FUSED),
    Group("the same, LAMB, NovoGrad, LARC", "tail-cpu-.*", "tail", "torch-fused: the formula.*"),
    Group("the same, torch without `fused`", "tail-cpu-.*", "tail", "torch-default: .*"),
    Group("block and step, one-element tensors", "host-cpu-.*", ".*", "torch-fused: .*"),
    Group("optimizer step alone", "ops-cpu-.*", r".*\.step", "torch-fused: .*"),
    Group("norm of gradients", "ops-cpu-.*", "l2norm.*", "torch: .*"),
    Group("`GradScaler.unscale_`", "ops-cpu-.*", "unscale", "torch: .*"),
    Group("scale and axpby of plain lists", "ops-cpu-.*", "scale|axpby", "torch: .*"),
    Group("casts of plain lists", "ops-cpu-.*", "cast .*", "torch: .*"),
    Group("small GPT, 16 bits, against autocast", "loop-cpu-.*", "O[1245]|O5-split", "autocast.*, torch-fused: .*"),
    Group("small GPT, O0, against fp32", "loop-cpu-.*", "O0", "fp32, torch-fused: .*"),
    Group("small GPT, 16 bits, against fp32", "loop-cpu-.*", "O[1245]|O5-split", "fp32, torch-fused: .*"),
    Group("small GPT, smaller state, against autocast", "loop-cpu-.*", "O5-split-.*", "autocast.*, torch-fused: .*"),
    Group("small GPT, 8-bit state, against others'", "loop-cpu-.*", "O5-split-8bit", "autocast.*-8bit: .*"),
)


def rows(found: Reports) -> list[tuple[str, list[float]]]:
    """What the picture has a row for, and the ratios in it."""
    return [(group.what.replace("`", ""), ratios) for group in GROUPS if (ratios := group.ratios(found))]


def picture(found: Reports) -> Iterator[str]:
    """The picture that plot.py draws, its figures as the text for those who cannot see it, and the machine."""
    values = "; ".join(f"{what} {_range(ratios)}" for what, ratios in rows(found))
    yield f"![torch's time by ampctx's on a CPU: {values}]({GAINS_PNG})"
    machines = {
        f"{report['machine']['cpu']}, {report['machine']['cores']} cores, torch {report['versions']['torch']}"
        for name, report in found.items()
        if any(re.fullmatch(group.file, name) for group in GROUPS)
    }
    if machines:
        yield ""
        yield (
            f"*Each dot is the median of one comparison. {'; '.join(sorted(machines))}:"
            " [commits and commands](benchmarks.md#machines-versions-commands).*"
        )


def _figure(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}"


def _word(low: float, high: float) -> str:
    """Level is within 5%."""
    if low >= 0.95 and high <= 1.05:
        return "Level"
    return "Faster" if low > 1 else "Slower" if high < 1 else "Faster or slower"


def _range(ratios: list[float]) -> str:
    low, high = min(ratios), max(ratios)
    return _figure(low) if low == high else f"{_figure(low)} to {_figure(high)}"


def gains(found: Reports) -> Iterator[str]:
    """Every group, under the word that its ratios have earned."""
    told: dict[str, list[str]] = {}
    for group in GROUPS:
        ratios = group.ratios(found)
        word = _word(min(ratios), max(ratios)) if ratios else "Not recorded"
        told.setdefault(word, []).append(f"{group.what} ({_range(ratios)})" if ratios else group.what)
    for word in ("Faster", "Level", "Faster or slower", "Slower", "Not recorded"):
        if word in told:
            yield f"- **{word}:** {'; '.join(told[word])}."
    missed = sum(verdict(goal, found)[2].startswith("missed") for goal in GOALS)
    yield f"- **Goals:** [{missed} of {len(GOALS)} are missed](../benchmarks/GOALS.md)."
    yield "- **GPU:** not measured."


def levels(found: Reports) -> Iterator[str]:
    """A row for each level, then one for each loop of torch's autocast that a level stands beside."""
    yield from _head(
        "loop", "ms per iteration", "times fp32 torch", "peak MB", "MB between steps", "bytes per parameter"
    )
    for name, report in found.items():
        if re.fullmatch("loop-cpu-.*", name):
            cases, others = report["cases"], dict[str, str]()
            for level, case in cases.items():
                others.update((who, level) for who in case["sides"] if re.fullmatch(".*, torch-fused|.* bf16, .*", who))
            for title, level in {**{level: level for level in cases}, **others}.items():
                sides, side = cases[level]["sides"], cases[level]["sides"]["ampctx" if title in cases else title]
                fp32 = sides["fp32, torch-fused"]
                slower = side["ms"]["median"] / fp32["ms"]["median"]
                if title in cases:  # of pairs, run one after the other
                    slower = 1 / fp32["over_ampctx"]["median"]
                memory = (f"{side[key]:.1f}" for key in ("peak_MB", "held_MB"))
                each = f"{side['held_MB'] * 1e6 / cases[level]['elements']:.1f}"
                yield _row(title, f"{side['ms']['median']:.0f}", f"{slower:.1f}", *memory, each)


def states(found: Reports) -> Iterator[str]:
    """The step of each optimizer with smaller state, beside its own with fp32 state."""
    yield from _head("step alone", "state", "ms (quartiles)", "ns per element", "times fp32 state")
    for name, report in found.items():
        for of_case in report["cases"].values() if re.fullmatch("ops-cpu-resnet50", name) else ():
            kinds = {"ampctx": "fp32", **{who: who.split()[0] for who in of_case["sides"] if who.endswith(" state")}}
            for who, kind in kinds.items() if len(kinds) > 1 else ():
                side = of_case["sides"][who]
                each = side["ms"]["median"] * 1e6 / of_case["elements"]
                slower = side["over_ampctx"]["median"] if kind != "fp32" else 1.0
                optimizer = side["what"].partition("(")[0]
                yield _row(optimizer, kind, _spread(side["ms"]), f"{each:.2f}", f"{slower:.1f}")


# --- writing ----------------------------------------------------------------------------------------------------------


PAGES: dict[Path, dict[str, Callable[[Reports], Iterator[str]]]] = {
    ROOT / "docs" / "performance.md": {"gains": gains, "picture": picture, "levels": levels, "states": states},
    ROOT / "docs" / "benchmarks.md": {
        "tails": lambda found: cases(found, "tail"),
        "ops": lambda found: cases(found, "ops"),
        "host": host,
        "loop": loop,
        "machines": machines,
    },
    ROOT / "benchmarks" / "GOALS.md": {"goals": goals},
}


def replaced(path: Path, page: str, found: Reports) -> str:
    """``page``, the text of ``path``, with every part between its marks as the reports have it.

    Raises:
        ValueError: the page lacks the marks of a part.
    """
    parts = PAGES[path]
    marked = [match[2] for match in MARKED.finditer(page)]
    if sorted(marked) != sorted(parts):
        raise ValueError(f"{path.name} has marks for {', '.join(marked) or 'nothing'}; expected {', '.join(parts)}")

    def fill(match: re.Match[str]) -> str:
        return f"{match[1]}\n" + "\n".join(parts[match[2]](found)) + f"\n\n{match[3]}"

    return MARKED.sub(fill, page)


def by_hand(page: str) -> str:
    """``page`` without what is written between marks."""
    return MARKED.sub("", page)


def main() -> None:
    found = reports(RESULTS)
    for path in PAGES:
        path.write_text(replaced(path, path.read_text(), found))


if __name__ == "__main__":
    main()
