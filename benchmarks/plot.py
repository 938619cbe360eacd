"""Draws the reports of benchmarks/results: peers' times by ampctx's, host time per tensor, memory of whole iterations.

    python benchmarks/plot.py [--results FOLDER] [--output FILE.png] [--gains FILE.png]

``--gains`` draws the picture of docs/performance.md: gains and losses, to be read at the width of a phone.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from report import RESULTS, reports, rows

FASTER, SLOWER = "#33679e", "#c2410c"  # far apart for every kind of colour vision


def ratios(axes: Axes, found: dict[str, dict[str, Any]]) -> None:
    """A bar for each side of each case but ampctx's own, with whiskers from quartile to quartile."""
    bars = [
        (f"{name.partition('-')[2]}{'' if case == 'tail' else ', ' + case}, {who}", side["over_ampctx"])
        for name, report in found.items()
        for case, of_case in report["cases"].items()
        for who, side in of_case["sides"].items()
        if "over_ampctx" in side
    ]
    places = range(len(bars))
    medians = [bar["median"] for _, bar in bars]
    whiskers = ([b["median"] - b["q1"] for _, b in bars], [b["q3"] - b["median"] for _, b in bars])
    colours = ["tab:green" if median >= 1 else "tab:red" for median in medians]
    axes.barh(
        places,
        [median - 1 for median in medians],
        left=1.0,
        xerr=whiskers,
        color=colours,
        height=0.7,
        error_kw={"lw": 0.8},
    )
    axes.set_yticks(places, [label for label, _ in bars], fontsize=7)
    axes.axvline(1.0, color="black", lw=0.8)
    axes.set_xscale("log")
    axes.invert_yaxis()
    axes.set_title("time of the peer / time of ampctx, median and quartiles")


def host(axes: Axes, found: dict[str, dict[str, Any]]) -> None:
    for name, report in found.items():
        cases = report["cases"].values()
        for who in next(iter(cases))["sides"]:
            points = [(case["tensors"], case["sides"][who]["us_per_tensor"]) for case in cases]
            axes.plot(*zip(*points, strict=True), "o-", label=f"{name.partition('-')[2]}, {who}")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("tensors")
    axes.set_title("host time, us per tensor and iteration")
    axes.legend(fontsize=7)


def memory(axes: Axes, found: dict[str, dict[str, Any]]) -> None:
    peaks = {}
    for name, report in found.items():
        for level, case in report["cases"].items():
            for who, side in case["sides"].items():
                peaks[f"{name.partition('-')[2]}, {level if who == 'ampctx' else who}"] = side["peak_MB"]
    axes.barh(list(peaks), list(peaks.values()), color="tab:blue")
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=7)
    axes.set_title("peak memory of an iteration, MB")


PARTS = (("ops", ratios), ("tail", ratios), ("host", host), ("loop", ratios), ("loop", memory))


def draw(folder: Path, output: Path) -> None:
    """Raises ValueError where the folder has no report."""
    drawn = [(part, found) for kind, part in PARTS if (found := reports(folder, kind))]
    if not drawn:
        raise ValueError(f"{folder} has no report of a benchmark")
    bars = [sum(len(c["sides"]) for r in found.values() for c in r["cases"].values()) for _, found in drawn]
    heights = [3.0 if part is host else 1.0 + 0.14 * n for (part, _), n in zip(drawn, bars, strict=True)]
    figure = Figure(figsize=(9, sum(heights)), layout="constrained")
    places = figure.subplots(len(drawn), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (part, found) in zip(places, drawn, strict=True):
        part(axes, found)
    figure.savefig(output, dpi=110)


def described(found: dict[str, dict[str, Any]]) -> str:
    """The figures of the dots, as the picture carries them."""
    return "; ".join(f"{what}: {' '.join(map(str, ratios))}" for what, ratios in rows(found))


def draw_gains(folder: Path, output: Path) -> None:
    """Raises ValueError where the folder has no report of a row."""
    found = reports(folder)
    drawn = rows(found)
    if not drawn:
        raise ValueError(f"{folder} has none of the comparisons that the picture shows")
    figure = Figure(figsize=(5.2, 0.9 + 0.34 * len(drawn)), layout="constrained")
    axes = figure.subplots()
    for place, (_, ratios) in enumerate(drawn):
        axes.plot((min(ratios), max(ratios)), (place, place), color="#bbbbbb", lw=1.5, zorder=1)
        colours = [FASTER if ratio >= 1 else SLOWER for ratio in ratios]
        axes.scatter(ratios, [place] * len(ratios), s=26, c=colours, alpha=0.75, linewidths=0, zorder=2)
    axes.set_xscale("log")
    every = [ratio for _, ratios in drawn for ratio in ratios]
    axes.set_xlim(min(*every, 0.5) / 1.25, max(*every, 2) * 1.25)
    ticks = [tick for tick in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20) if axes.get_xlim()[0] <= tick <= axes.get_xlim()[1]]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=9)
    axes.minorticks_off()
    axes.set_yticks(range(len(drawn)), [what for what, _ in drawn], fontsize=9)
    axes.set_ylim(len(drawn) - 0.5, -0.5)
    axes.axvline(1.0, color="#222222", lw=1.2)
    axes.axvspan(axes.get_xlim()[0], 1, color=SLOWER, alpha=0.07, lw=0)
    axes.axvspan(1, axes.get_xlim()[1], color=FASTER, alpha=0.07, lw=0)
    top = axes.get_xaxis_transform()
    axes.text(0.96, 1.01, "ampctx is slower", transform=top, ha="right", va="bottom", color=SLOWER, fontsize=9)
    axes.text(1.04, 1.01, "ampctx is faster", transform=top, ha="left", va="bottom", color=FASTER, fontsize=9)
    axes.set_xlabel("torch's time / ampctx's time on a CPU", fontsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.savefig(output, dpi=200, facecolor="white", metadata={"Description": described(found), "Software": None})


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--output", type=Path, default=RESULTS / "bench.png", metavar="FILE.png")
    parser.add_argument("--gains", type=Path, metavar="FILE.png", help="draw the picture of docs/performance.md there")
    args = parser.parse_args(arguments)
    try:
        draw(args.results, args.output)
        if args.gains:
            draw_gains(args.results, args.gains)
    except ValueError as error:
        parser.error(f"--results: {error}")
    print("wrote", *(str(path) for path in (args.output, args.gains) if path))


if __name__ == "__main__":
    sys.exit(main())
