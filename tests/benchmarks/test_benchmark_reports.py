"""The CSV of figures, and what pages say of them."""

from __future__ import annotations

import re

import measuring
import report
import suite
from measuring import ROOT


def test_goals_and_figures_are_those_of_the_suite():
    entries = {entry.name: entry for device in ("cpu", "cuda") for entry in suite.entries(device)}
    for goal in report.GOALS:
        assert any(re.fullmatch(goal.figures.partition("/")[0], name) for name, e in entries.items() if e.goal), goal
    recorded = measuring.read()
    for figure, found in recorded.items():
        name = figure.partition("/")[0]
        assert name in entries or found.command.startswith("python tests/reliability/"), figure
        assert figure.count("/") == 3
        assert re.fullmatch(r"[0-9a-f]{12}(-dirty)?", found.commit)
    assert len(report.ratios(report.load())) == len(report.GROUPS)


UNIT = r"(?:ms|us|µs|ns|s|seconds|minutes|GB/s|times)(?!\w)"
IN_TEXT = re.compile(rf"(?<![\w.,^])\d[\d.,]*(?: (?:to|and|or) \d[\d.,]*)*(?: ?{UNIT}|x(?!\w))")
MADE = {ROOT / "docs" / "benchmarks.md"}
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted({*(ROOT / "docs").rglob("*.md")} - MADE)]
PAGES += sorted((ROOT / "benchmarks").glob("*.md"))
FOUND = report.load()


def values(pattern):
    return list(report.matching(FOUND, pattern).values())


def tails(name):
    return values(f"tail-cpu-{name}-clip/tail/(ampctx|torch-fused)/time")


SLOWER = [
    of([1 / ratio for ratio in values(report.GROUPS[f"small GPT, {dtype}, against fp32"])])
    for dtype in ("bf16", "fp16")
    for of in (min, max)
]
ON_A_GPU = ("ampctx/time", "torch-fused/time", "torch-fused/ratio")
# The line of a page, by some of its words, and what it says in numbers.
RECORDED = {
    ("README.md", "161 DTensors"): tails("tiny161-O1-FusedAdam-8"),
    ("README.md", "under amp, 1,000 DTensors"): tails("tiny1000-O1-FusedAdam-8"),
    ("README.md", "under amp, GPT-2 small"): tails("gpt2-small-O2-FusedAdam"),
    ("README.md", "in bf16, GPT-2 small"): values("bf16-cpu-gpt2-small/bf16/(ampctx|torch .*)/time"),
    ("README.md", "in bf16, 1,000 DTensors"): values("bf16-cpu-tiny1000-8/bf16/(ampctx|torch .*)/time"),
    ("README.md", "BERT-large"): [of(values(f"tail-cuda-bert.*/{what}")) for what in ON_A_GPU for of in (min, max)],
    ("docs/why.md", "A small GPT takes"): SLOWER,
}


def figures_of(page: str) -> dict[str, list[str]]:
    """Each line with numbers of a unit of time, or ratios, and these. Code and what `make docs` fills in left out."""
    found: dict[str, list[str]] = {}
    head: list[bool] = []  # which columns of the table have a unit
    for line in re.sub(r"```.*?```", "", page, flags=re.S).splitlines():
        said = re.sub(r"`[^`]*`", "code", line)
        cells = [cell.strip() for cell in said[1:-1].split("|")] if line.startswith("|") else []
        timed = [re.search(rf"(?<!\w){UNIT}", cell) is not None for cell in cells]
        head = (head or timed) if cells else []
        of_cells = [
            cell
            for cell, unit in zip(cells, head, strict=True)
            if (unit or timed[0]) and re.fullmatch(r"\d[\d.,]*", cell)
        ]
        if numbers := of_cells + [n for each in IN_TEXT.findall(said) for n in re.findall(r"\d[\d.,]*", each)]:
            found[line] = numbers
    return found


def test_pages_have_recorded_figures():
    """A number with a unit of time, or a ratio, is a figure, and what a page says is what was recorded."""
    compared = set()
    for page in PAGES:
        name = page.relative_to(ROOT).as_posix()
        for line, numbers in figures_of(page.read_text()).items():
            (key,) = [key for key in RECORDED if key[0] == name and key[1] in line] or [None]
            assert key, f"{name} has figures that nothing compares with benchmarks/results:\n{line}"
            decimals = [len(number.partition(".")[2]) for number in numbers]
            assert numbers == [f"{v:.{n}f}" for v, n in zip(RECORDED[key], decimals, strict=True)], line
            compared.add(key)
    assert compared == set(RECORDED)
