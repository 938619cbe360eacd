"""Draws the reports of benchmarks/results: peers' times by ampctx's, host time per tensor, memory of whole iterations.

    python benchmarks/plot.py [--results FOLDER] [--output FILE.png] [--tail FILE.png]

``--tail`` draws the picture of docs/performance.md: six bars, to be read at the width of a phone.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from report import RESULTS, bars, reports


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
    """The figures of the bars, as the picture carries them."""
    return "; ".join(f"{label}: {of['q1']} {of['median']} {of['q3']}" for label, of in bars(found)).replace("\n", ", ")


def draw_tail(folder: Path, output: Path) -> None:
    """Raises ValueError where the folder lacks the reports of the bars."""
    found = reports(folder, "tail")
    drawn = bars(found)
    if not drawn:
        raise ValueError(f"{folder} has none of the tails that the picture shows")
    figure = Figure(figsize=(4.0, 3.6), layout="constrained")
    axes = figure.subplots()
    places = range(len(drawn))
    medians = [of["median"] for _, of in drawn]
    whiskers = ([of["median"] - of["q1"] for _, of in drawn], [of["q3"] - of["median"] for _, of in drawn])
    axes.barh(places, medians, xerr=whiskers, color="#4477aa", ecolor="#222222", height=0.7)
    for place, (_, of) in zip(places, drawn, strict=True):
        axes.text(0.06, place, f"{of['median']:.2f}x", va="center", color="white", fontweight="bold", fontsize=11)
    axes.set_yticks(places, [label for label, _ in drawn], fontsize=10)
    axes.axvline(1.0, color="#222222", lw=1.2, ls="--")
    axes.invert_yaxis()
    axes.tick_params(axis="x", labelsize=10)
    axes.set_xlabel("above 1: ampctx is faster", fontsize=10)
    figure.suptitle("Step time after backward on a CPU,\ntorch's fused AdamW / ampctx's FusedAdam", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(output, dpi=200, facecolor="white", metadata={"Description": described(found), "Software": None})


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--output", type=Path, default=RESULTS / "bench.png", metavar="FILE.png")
    parser.add_argument("--tail", type=Path, metavar="FILE.png", help="draw the picture of docs/performance.md there")
    args = parser.parse_args(arguments)
    try:
        draw(args.results, args.output)
        if args.tail:
            draw_tail(args.results, args.tail)
    except ValueError as error:
        parser.error(f"--results: {error}")
    print("wrote", *(str(path) for path in (args.output, args.tail) if path))


if __name__ == "__main__":
    sys.exit(main())
