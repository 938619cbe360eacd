"""What the docs say of the figures in benchmarks/results: figures.csv, and the reports of `make gpu-check`.

    python benchmarks/report.py [NAME ...]                  prints parts, such as goals
    python benchmarks/report.py --picture docs/_static/gains.png

`make docs` writes docs/benchmarks.md, which is in no commit, and puts each part where a page has its mark, such as
``<!-- figures: goals -->``: see docs/conf.py.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "benchmarks" / "results" / "figures.csv"
MARK = re.compile(r"<!-- figures: (\w+) -->")
# Rows of a report that no page shows: FusedSGD's was disturbed (quartiles 2.6 to 4.9 ms), the others' kernels are gone.
LEFT_OUT = "53b8af5750d2-dirty", re.compile("tail-cuda-.*(FusedSGD|FusedMixed|FusedNovo|LARC)")
FASTER, SLOWER = "#33679e", "#c2410c"  # far apart for every kind of colour vision

Rows = list[dict[str, str]]


def load(file: Path = FIGURES) -> Rows:
    """The rows of a CSV, and those of the reports from GPUs beside it."""
    with file.open(newline="") as lines:
        reader = csv.DictReader(lines)
        found = list(reader)
    for name in sorted(file.parent.glob("gpu-check-*.json")):
        for part in json.loads(name.read_text())["parts"].values():
            found += [dict(zip(reader.fieldnames, row, strict=True)) for row in part.get("figures", {}).values()]
    commit, name = LEFT_OUT
    return [row for row in found if row["commit"] != commit or not name.match(row["figure"])]


def matching(found: Rows, pattern: str) -> dict[str, float]:
    """The values of the figures whose whole name matches."""
    return {row["figure"]: float(row["value"]) for row in found if re.fullmatch(pattern, row["figure"])}


class Goal(NamedTuple):
    """The least ratio of torch's time to ours. ``figures``: a pattern; the worst of what it matches counts."""

    what: str
    figures: str
    at_least: float


# At O1 and O2, each without and with a clip.
_TAILS = {
    "161 tensors of one element": ("host-cpu-{}{}/161 tensors", (5.0, 7.0, 4.5, 6.0)),
    "5,000 tiny tensors": ("tail-cpu-tiny5000-{}-FusedAdam{}/tail", (3.0, 3.5, 3.3, 3.7)),
    "EfficientNet-B7, 700 tensors": ("tail-cpu-efficientnet-b7-{}-FusedAdam{}/tail", (4.0, 5.5, 4.0, 5.0)),
    "a LoRA, 1,100 tensors of 4,096 elements": ("tail-cpu-lora-{}-FusedAdam{}/tail", (2.2, 2.7, 2.8, 3.3)),
    "ResNet-50": ("tail-cpu-resnet50-{}-FusedAdam{}/tail", (1.25, 1.3, 2.05, 2.5)),
    "GPT-2 small": ("tail-cpu-gpt2-small-{}-FusedAdam{}/tail", (1.25, 1.3, 2.05, 2.5)),
}
_CASES = [(level, clip) for level in ("O1", "O2") for clip in ("", "-clip")]
GOALS = (
    *(
        Goal(f"{what}, {level}{clip.replace('-', ', with ')}", f"{name.format(level, clip)}/torch-fused/ratio", ratio)
        for what, (name, ratios) in _TAILS.items()
        for (level, clip), ratio in zip(_CASES, ratios, strict=True)
    ),
    Goal("`FusedAdam.step`, ResNet-50", "ops-cpu-resnet50/FusedAdam.step/torch-fused/ratio", 1.1),
    Goal("`GradScaler.unscale_`, ResNet-50", "ops-cpu-resnet50/unscale/torch.*/ratio", 1.4),
    Goal("`clip_grad_norm_` that clips, ResNet-50", "ops-cpu-resnet50/clip/torch.*/ratio", 1.35),
    Goal("whole iterations at O0 against fp32", "loop-cpu-gpt-small/O0/fp32 with torch-fused/ratio", 1.0),
    Goal("whole iterations at O1, O4 against autocast", "loop-cpu-gpt-small/O[14]/autocast.*/ratio", 1.0),
)


def met_or_missed(goal: Goal, found: Rows) -> tuple[str, str, str]:
    """The goal, the measured value, and whether that reaches the goal."""
    figures = matching(found, goal.figures)
    if not figures:
        return f"{goal.at_least:g}", "not recorded", ""
    worst = min(figures, key=figures.__getitem__)
    value = figures[worst]
    shown = (f"{worst.split('/')[1]}: " if len(figures) > 1 else "") + f"{value:.3g}"
    reached = "reached" if value >= goal.at_least else f"missed by {1 - value / goal.at_least:.0%}"
    return f"{goal.at_least:g}", shown, reached


def table(head: tuple[Any, ...], rows: Iterator[tuple[Any, ...]]) -> Iterator[str]:
    for cells in (head, ("---",) * len(head), *rows):
        yield "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def goals(found: Rows) -> Iterator[str]:
    head = ("torch's time by ours", "goal", "measured (median)", "")
    yield from table(head, ((goal.what, *met_or_missed(goal, found)) for goal in GOALS))


# --- docs/performance.md ----------------------------------------------------------------------------------------------

_OWN = "FusedLAMB"  # torch has none: its formula stands in
GROUPS = {
    "step after backward, ResNet-50": rf"tail-cpu-resnet50-O\d-(?!{_OWN}).*/torch-fused/ratio",
    "the same, GPT-2 small, EfficientNet-B7, a LoRA": r"tail-cpu-(gpt2|efficientnet|lora).*/torch-fused/ratio",
    "step after backward, small tensors": r"tail-cpu-tiny(?!.*-8-clip/).*/torch-fused/ratio",
    "the same, DTensors of one of 8 ranks": r"tail-cpu-\w+-O1-FusedAdam-8-clip/.*/torch-fused/ratio",
    "the same, LAMB": rf"tail-cpu-\w+-O\d-({_OWN}).*/torch-fused/ratio",
    "the same, torch without `fused`": r"tail-cpu-.*/torch-default/ratio",
    "bf16 weights without amp, against torch's in bf16": r"bf16-cpu-.*/torch bf16/ratio",
    "the same, against torch's in fp32": r"bf16-cpu-.*/torch fp32/ratio",
    "block and step, one-element tensors": r"host-cpu-.*/torch-fused/ratio",
    "optimizer step alone": r"ops-cpu-[^/]*/.*\.step/torch-fused/ratio",
    "norm of gradients": r"ops-cpu-[^/]*/l2norm.*/torch.*/ratio",
    "`GradScaler.unscale_`": r"ops-cpu-[^/]*/unscale/torch.*/ratio",
    "axpby of plain lists": r"ops-cpu-[^/]*/axpby/torch.*/ratio",
    "casts of plain lists": r"ops-cpu-[^/]*/cast .*/torch.*/ratio",
    "small GPT, 16 bits, against autocast": r"loop-cpu-[^/]*/(O[1245]|O5-split)/autocast.* torch-fused/ratio",
    "small GPT, O0, against fp32": r"loop-cpu-gpt-small/O0/fp32 with torch-fused/ratio",
    "small GPT, bf16, against fp32": r"loop-cpu-[^/]*/(O[45]|O5-split)/fp32 with torch-fused/ratio",
    "small GPT, fp16, against fp32": r"loop-cpu-[^/]*/O[12]/fp32 with torch-fused/ratio",
    "small GPT, smaller state, against autocast": r"loop-cpu-[^/]*/O5-split-.*/autocast.* torch-fused/ratio",
    "small GPT, 8-bit state, against others'": r"loop-cpu-[^/]*/O5-split-8bit/autocast.*-8bit/ratio",
}


def ratios(found: Rows) -> dict[str, list[float]]:
    """Of each group that has some, rounded as they are shown."""
    of_groups = {what: [round(v, 2) for v in matching(found, group).values()] for what, group in GROUPS.items()}
    return {what: values for what, values in of_groups.items() if values}


def _range(values: list[float]) -> str:
    low, high = (f"{v:.2f}" if v < 10 else f"{v:.1f}" for v in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def gains(found: Rows) -> Iterator[str]:
    """Every group, under the word that its ratios have earned; level is within 5%."""
    told: dict[str, list[str]] = {"Faster": [], "Level": [], "Faster or slower": [], "Slower": []}
    for what, values in ratios(found).items():
        low, high = min(values), max(values)
        level = low >= 0.95 and high <= 1.05
        word = "Level" if level else "Faster" if low > 1 else "Slower" if high < 1 else "Faster or slower"
        told[word].append(f"{what} ({_range(values)})")
    told["Not recorded"] = [what for what in GROUPS if what not in ratios(found)]
    for word, groups in told.items():
        if groups:
            yield f"- **{word}:** {'; '.join(groups)}."


MODELS = {
    "ResNet-50": "resnet50-{}-FusedAdam",
    "EfficientNet-B7": "efficientnet-b7-{}-FusedAdam",
    "GPT-2 small": "gpt2-small-{}-FusedAdam",
    "a LoRA of 1,100 tensors": "lora-{}-FusedAdam",
    "161 DTensors of one of 8 ranks": "tiny161-{}-FusedAdam-8",
    "1,000 DTensors of one of 8 ranks": "tiny1000-{}-FusedAdam-8",
}


def models(found: Rows) -> Iterator[str]:
    """The step after backward of the models that people train, with a clip."""

    def cells(name: str) -> Iterator[str]:
        for level in ("O1", "O2"):
            report = f"tail-cpu-{name.format(level)}-clip/tail"
            times = [matching(found, f"{report}/{who}/time") for who in ("ampctx", "torch-fused")]
            yield from (f"{next(iter(of.values())):.3g}" if of else "" for of in times)

    head = ("ms on a CPU", "ampctx, O1", "torch, O1", "ampctx, O2", "torch, O2")
    yield from table(head, ((model, *cells(name)) for model, name in MODELS.items()))


BF16 = {"GPT-2 small": "gpt2-small", "161 DTensors of one of 8 ranks": "tiny161-8"}
BF16["1,000 DTensors of one of 8 ranks"] = "tiny1000-8"


def bf16(found: Rows) -> Iterator[str]:
    """Steps on bf16 weights without amp, and the bytes that they move for each parameter."""
    sides = ("ampctx", "torch bf16", "torch fp32", "bf16 state", "8bit state")

    def row(report: str, quantity: str) -> list[str]:
        values = matching(found, f"bf16-cpu-{report}/bf16/.*/{quantity}")
        of_sides = (values.get(f"bf16-cpu-{report}/bf16/{who}/{quantity}") for who in sides)
        return ["" if value is None else f"{value:.3g}" for value in of_sides]

    rows = [(f"{model}, ms", *row(report, "time")) for model, report in BF16.items()]
    rows.append(("bytes moved for each parameter of GPT-2 small", *row("gpt2-small", "bytes")))
    head = ("", "ampctx", "torch, bf16", "torch, fp32", "ampctx, bf16 state", "ampctx, 8-bit state")
    yield from table(head, iter(rows))


def levels(found: Rows) -> Iterator[str]:
    """A row for each level, then one for each loop of torch that a level stands beside."""
    (elements,) = matching(found, "loop-cpu-.*/model/all/elements").values()
    sides = [row["figure"].rpartition("/")[0] for row in found if re.fullmatch("loop-cpu-.*/time", row["figure"])]
    fp32 = next(of for side, of in ((s, matching(found, re.escape(s) + "/time")) for s in sides) if "/fp32 " in side)

    def row(side: str) -> tuple[str, ...]:
        time, step, peak, held = (
            matching(found, f"{re.escape(side)}/{quantity}").popitem()[1]
            for quantity in ("time", "step", "peak memory", "held memory")
        )
        slower = time / next(iter(fp32.values()))
        if "/ampctx/" in side:  # of pairs, run one after the other
            level = side.replace("/ampctx/", "/")
            slower = 1 / matching(found, f"{re.escape(level)}/fp32 with torch-fused/ratio").popitem()[1]
        shown = (f"{time:.0f}", f"{step / time:.0%}", f"{slower:.1f}", f"{peak:.1f}", f"{held:.1f}")
        return side.rpartition("/")[2], *shown, f"{held * 1e6 / elements:.1f}"

    head = ("loop", "ms per iteration", "of it after backward", "times fp32 torch", "peak MB", "MB between steps")
    head = (*head, "bytes per parameter")
    wanted = [side for side in sides if "/ampctx/" in side or "torch-fused" in side or "bf16" in side]
    yield from table(head, map(row, sorted(wanted, key=lambda side: "/torch/" in side)))


def states(found: Rows) -> Iterator[str]:
    """The step of each optimizer with smaller state, beside its own with fp32 state."""
    (elements,) = matching(found, "ops-cpu-resnet50/model/all/elements").values()

    def rows() -> Iterator[tuple[str, ...]]:
        for figure, slower in matching(found, "ops-cpu-resnet50/.*/(bf16|8bit) state/ratio").items():
            _, case, state, _ = figure.split("/")
            for side, times in (("ampctx", 1.0), (state, slower)) if state == "bf16 state" else ((state, slower),):
                ms = matching(found, f"ops-cpu-resnet50/{case}/{side}/time").popitem()[1]
                kind = "fp32" if side == "ampctx" else side.split()[0]
                yield case.removesuffix(".step"), kind, f"{ms:.2f}", f"{ms * 1e6 / elements:.2f}", f"{times:.1f}"

    yield from table(("step alone", "state", "ms", "ns per element", "times fp32 state"), rows())


def gpu(found: Rows) -> Iterator[str]:
    """Every comparison with torch's fastest on a GPU."""
    ratios = matching(found, "(tail|ops)-cuda-.*/torch-fused/ratio")
    machine = {row["machine"] for row in found if row["figure"] in ratios}

    def rows() -> Iterator[tuple[str, ...]]:
        for figure, ratio in ratios.items():
            report, case, side, _ = figure.split("/")
            ours, theirs = (
                matching(found, re.escape(f"{report}/{case}/{who}/time")).popitem()[1] for who in ("ampctx", side)
            )
            kind, name = report.split("-cuda-")
            # "bert-large" and "torch-Adam" have a hyphen of their own.
            parts = re.findall(r"bert-large|torch-Adam|[^-]+", name)
            said = [f"DTensors of {part} ranks" if part.isdigit() else part for part in parts]
            yield ", ".join([*([case] if kind == "ops" else []), *said]), f"{ours:.2f}", f"{theirs:.2f}", f"{ratio:.2f}"

    yield from table(("step after backward", "ampctx, ms", "torch, ms", "torch / ampctx"), rows())
    yield f"\n*Medians of 11 rounds, [models](../benchmarks/README.md). {'; '.join(sorted(machine))}.*"


def kernels(found: Rows) -> Iterator[str]:
    """What each kernel takes on a GPU."""
    quantities = {"time": "ms", "of copy": "of a copy", "of peak": "of the peak"}
    quantities |= {"launches": "launches", "captured": "ms in a graph"}
    values = matching(found, "kernels-cuda-.*")
    sides = [figure.removesuffix("/of copy") for figure in values if figure.endswith("/of copy")]

    def row(side: str) -> tuple[str, ...]:
        cells = (values.get(f"{side}/{quantity}") for quantity in quantities)
        return *side.split("-cuda-")[1].split("/"), *("not measured" if v is None else f"{v:.3g}" for v in cells)

    nothing = ("any", "any", "any", *("not measured yet" for _ in quantities))
    yield from table(("model", "kernel", "by", *quantities.values()), map(row, sides) if sides else iter([nothing]))


def start(found: Rows) -> Iterator[str]:
    """What comes before the first step."""
    for what, told in (("import", "`import ampctx` after `import torch`"), ("build", "The build of the CPU kernels")):
        for ms in matching(found, f"start-cpu/{what}/ampctx/time").values():
            yield f"- {told}: {ms / 1000:.2g} s"


def machines(found: Rows) -> Iterator[str]:
    """What the picture was measured on."""
    where = {row["machine"] for row in found if any(re.fullmatch(group, row["figure"]) for group in GROUPS.values())}
    yield f"*Each dot is the median of one comparison. {'; '.join(sorted(where))}.*"


PARTS: dict[str, Callable[[Rows], Iterator[str]]] = {
    "goals": goals, "gains": gains, "models": models, "levels": levels, "states": states, "gpu": gpu,
    "bf16": bf16, "kernels": kernels, "machines": machines, "start": start,
}  # fmt: skip


def filled(page: str, found: Rows) -> str:
    """``page`` with each part in the place of its mark."""
    return MARK.sub(lambda mark: "\n".join(PARTS[mark[1]](found)), page)


# --- docs/benchmarks.md -----------------------------------------------------------------------------------------------

INTRO = """# Benchmark tables

Every figure of [figures.csv](../benchmarks/results/figures.csv), recorded by `make bench`, and of `make gpu-check`:
medians.
[Performance](performance.md) sums them up; [benchmarks/README.md](../benchmarks/README.md) explains how they are taken.
"ratio" is the side's time by ampctx's in the same round: above 1, ampctx is faster. "of bound" is the share of ampctx's
time that moving the least bytes would take, at the memory bandwidth measured in the same rounds.
"""
KINDS = {
    "tail": "The step after backward",
    "bf16": "The step on bf16 weights without amp",
    "offload": "The step in host memory",
    "ops": "Ops",
    "kernels": "Kernels on a GPU",
    "host": "Host time",
    "loop": "Whole iterations and memory",
}


def page(found: Rows) -> str:
    """A table for each script, with a column for each of its quantities."""
    lines = [INTRO]
    for kind, title in KINDS.items():
        cells: dict[tuple[str, ...], dict[str, str]] = {}
        for row in found:
            if row["figure"].startswith(f"{kind}-"):
                *side, quantity = row["figure"].split("/")
                cells.setdefault(tuple(side), {})[f"{quantity}, {row['unit']}".removesuffix(", ")] = row["value"]
        columns = list(dict.fromkeys(quantity for values in cells.values() for quantity in values))
        rows = ((*side, *(values.get(column, "") for column in columns)) for side, values in cells.items())
        lines += [f"\n## {title}\n", *table(("report", "case", "side", *columns), rows)]
    about = {row["figure"].split("/")[0]: (row["machine"], row["commit"], f"`{row['command']}`") for row in found}
    lines += ["\n## Machines, versions, commands\n"]
    lines += table(("report", "machine", "commit", "command"), ((name, *of) for name, of in about.items()))
    return "\n".join(lines) + "\n"


# --- docs/_static/gains.png -------------------------------------------------------------------------------------------


def draw(found: Rows, output: Path) -> None:
    """Gains and losses, to be read at the width of a phone; the picture carries its figures as text."""
    from matplotlib.figure import Figure

    drawn = {what.replace("`", ""): values for what, values in ratios(found).items()}
    figure = Figure(figsize=(5.2, 0.9 + 0.34 * len(drawn)), layout="constrained")
    axes = figure.subplots()
    for place, values in enumerate(drawn.values()):
        axes.plot((min(values), max(values)), (place, place), color="#bbbbbb", lw=1.5, zorder=1)
        colours = [FASTER if value >= 1 else SLOWER for value in values]
        axes.scatter(values, [place] * len(values), s=26, c=colours, alpha=0.75, linewidths=0, zorder=2)
    axes.set_xscale("log")
    every = [value for values in drawn.values() for value in values]
    left, right = min(*every, 0.5) / 1.25, max(*every, 2) * 1.25
    axes.set_xlim(left, right)
    ticks = [tick for tick in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20) if left <= tick <= right]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=9)
    axes.minorticks_off()
    axes.set_yticks(range(len(drawn)), list(drawn), fontsize=9)
    axes.set_ylim(len(drawn) - 0.5, -0.5)
    axes.axvline(1.0, color="#222222", lw=1.2)
    axes.axvspan(left, 1, color=SLOWER, alpha=0.07, lw=0)
    axes.axvspan(1, right, color=FASTER, alpha=0.07, lw=0)
    for x, side, word, colour in ((0.96, "right", "slower", SLOWER), (1.04, "left", "faster", FASTER)):
        place = {"transform": axes.get_xaxis_transform(), "ha": side, "va": "bottom"}
        axes.text(x, 1.01, f"ampctx is {word}", color=colour, fontsize=9, **place)
    axes.set_xlabel("torch's time / ampctx's, on a CPU", fontsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    told = "; ".join(f"{what}: {' '.join(map(str, values))}" for what, values in drawn.items())
    figure.savefig(output, dpi=200, facecolor="white", metadata={"Description": told, "Software": None})


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="NAME", help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--csv", type=Path, default=FIGURES)
    parser.add_argument("--picture", type=Path, metavar="FILE.png", help="draw the picture of docs/performance.md")
    args = parser.parse_args(arguments)
    if unknown := [part for part in args.parts if part not in PARTS]:
        parser.error(f"{unknown[0]} is none of {', '.join(PARTS)}")
    found = load(args.csv)
    for part in args.parts:
        print("\n".join(PARTS[part](found)))
    if args.picture:
        draw(found, args.picture)


if __name__ == "__main__":
    sys.exit(main())
