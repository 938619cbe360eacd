"""The CSV of figures, and what is made of it: comparisons, the page of the site, the parts of pages, the picture."""

from __future__ import annotations

import json
import re

import compare
import measuring
import pytest
import report
import suite
from measuring import ROOT, Row

TAIL = "tail-cpu-tiny161-O2-FusedAdam/tail"


def row(figure, value, unit="ms", machine="a CPU"):
    return Row(figure, str(value), unit, machine, "c" * 12, "python benchmarks/tail.py")


def of_ratios(*figures):
    return [row(figure, value)._asdict() for figure, value in figures]


@pytest.fixture
def csv(tmp_path):
    def write(name, *rows):
        measuring.write(tmp_path / name, rows)
        return str(tmp_path / name)

    return write


def test_a_case_has_times_ratios_by_round_and_a_bound():
    samples = {
        "ampctx": {"time": [1.0, 2.0, 4.0], "exit": [0.5, 1.0, 2.0]},
        "torch": {"time": [3.0, 2.0, 8.0], "exit": [9.0, 9.0, 9.0]},
        "bandwidth": {"copy": [5.0, 6.0, 7.0], "in place": [8.0, 10.0, 9.0]},
    }
    assert measuring.figures("tail", samples, floor_bytes=10**7) == {
        "tail/ampctx/time": [1.0, 2.0, 4.0],
        "tail/ampctx/exit": [0.5, 1.0, 2.0],
        "tail/torch/time": [3.0, 2.0, 8.0],
        "tail/torch/ratio": [3.0, 1.0, 2.0],
        "tail/ampctx/of bound": [0.5],  # 1 ms at the fastest pass, 10 GB/s
        "memory/copy/bandwidth": [5.0, 6.0, 7.0],
        "memory/in place/bandwidth": [8.0, 10.0, 9.0],
    }


def test_rounds_are_interleaved_and_warmed_up():
    calls = []
    samples = measuring.interleave("abc", lambda who, n: calls.append((n, who)) or {"ms": float(n)}, 4)
    assert samples == {who: {"ms": [0.0, 1.0, 2.0, 3.0]} for who in "abc"}
    rounds = [[who for n, who in calls if n == number] for number in range(-measuring.WARMUP_ROUNDS, 4)]
    assert [n for n, _ in calls] == sorted(n for n, _ in calls)
    assert all(sorted(order) == ["a", "b", "c"] for order in rounds)
    assert len(set(map(tuple, rounds))) > 1


def test_a_report_replaces_all_that_the_csv_has_of_it(csv, tmp_path):
    csv("f.csv", row("tail-a/x/ampctx/time", 1), row("tail-a/x/gone/time", 2), row("tail-b/x/ampctx/time", 3))
    csv("f.csv", row("tail-a/x/ampctx/time", 4), row('tail-a/a "case", b/ampctx/time', 5))
    assert [(r.figure, r.value) for r in measuring.read(tmp_path / "f.csv").values()] == [
        ("tail-a/x/ampctx/time", "4"),
        ('tail-a/a "case", b/ampctx/time', "5"),
        ("tail-b/x/ampctx/time", "3"),
    ]


# --- compare ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs", "limit", "code"),
    [
        pytest.param(12, 20, ["--fail-on-regression", "5"], 1, id="more-than-5-percent"),
        pytest.param(12, 20, ["--fail-on-regression", "30"], 0, id="less-than-30-percent"),
        pytest.param(12, 20, [], 0, id="no-limit"),
        pytest.param(8, 20, ["--fail-on-regression", "0"], 0, id="faster"),
        pytest.param(10, 40, ["--fail-on-regression", "0"], 0, id="slower-peer"),
    ],
)
def test_exit_code_of_compare(ours, theirs, limit, code, csv, capsys):
    old = csv("old.csv", row(f"{TAIL}/ampctx/time", 10), row(f"{TAIL}/torch-fused/time", 20))
    new = csv("new.csv", row(f"{TAIL}/ampctx/time", ours), row(f"{TAIL}/torch-fused/time", theirs, machine="another"))
    assert compare.main([old, new, *limit]) == code
    out = capsys.readouterr().out
    assert (f"{TAIL}/ampctx/time: slower by 20.0%, more than 5%" in out) == bool(code)
    assert f"{ours / 10:8.3f}" in out
    assert "another machine: a CPU and another" in out


def test_compare_refuses(csv, tmp_path, capsys):
    old, other = csv("old.csv", row("tail-a/x/ampctx/time", 1)), csv("other.csv", row("tail-b/x/ampctx/time", 1))
    (tmp_path / "text.csv").write_text("no,figures\n1,2\n")
    for new, message in (
        (str(tmp_path / "none.csv"), "none.csv"),
        (str(tmp_path / "text.csv"), "no CSV of figures"),
        (other, "have no figure in common"),
    ):
        with pytest.raises(SystemExit) as ended:
            compare.main([old, new])
        assert ended.value.code == 2
        assert message in capsys.readouterr().err


# --- the pages and the picture ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", ["docs/performance.md", "benchmarks/GOALS.md"])
def test_figures_of_a_page_are_put_into_its_marks(page):
    """What is measured changes with `make bench`: none of it is written by hand."""
    text = (report.ROOT / page).read_text()
    assert re.findall(r"\d+\.\d+|\d+ ?%|\d+ ms", text) == []
    marks = report.MARK.findall(text)
    filled = report.filled(text, report.load())
    assert marks
    assert report.MARK.findall(filled) == []
    for mark in marks:
        assert "\n".join(report.PARTS[mark](report.load())) in filled


@pytest.mark.parametrize(
    ("values", "told"),
    [
        pytest.param([2.0, 3.0], "- **Faster:** step after backward, small tensors (2.00 to 3.00).", id="faster"),
        pytest.param([0.96, 1.04], "- **Level:** step after backward, small tensors (0.96 to 1.04).", id="level"),
        pytest.param([0.5, 0.5], "- **Slower:** step after backward, small tensors (0.50).", id="slower"),
        pytest.param([0.5, 2.0], "- **Faster or slower:** step after backward, small tensors (0.50 to 2.00", id="both"),
    ],
)
def test_gains_are_called_what_they_are(values, told):
    found = of_ratios(*((f"tail-cpu-tiny{i}-O1/tail/torch-fused/ratio", v) for i, v in enumerate(values)))
    found += of_ratios(("tail-cuda-tiny0-O1/tail/torch-fused/ratio", 9.0))
    lines = list(report.gains(found))
    assert lines[0].startswith(told)
    assert lines[1].startswith("- **Not recorded:** step after backward, ResNet-50; the same, GPT-2")


def test_goals_say_by_how_much_they_are_missed():
    goal = report.Goal("C2", "a tail", f"{TAIL}/torch-fused/ratio", at_least=2.5)
    assert report.met_or_missed(goal, []) == ("at least 2.5", "not recorded", "")
    for value, enough in ((2.0, "missed by 20%"), (2.5, "reached")):
        found = of_ratios((f"{TAIL}/torch-fused/ratio", value))
        assert report.met_or_missed(goal, found) == ("at least 2.5", f"{value:g}", enough)
    limit = report.Goal("G8", "host time", "host/x/ampctx/time", at_most=0.5, unit=" ms")
    found = of_ratios(("host/x/ampctx/time", 1.0))
    assert report.met_or_missed(limit, found) == ("at most 0.5 ms", "1 ms", "missed, 2.0 times as much")
    assert report.met_or_missed(limit, of_ratios(("host/x/ampctx/time", 0.5)))[2] == "reached"


def test_a_goal_for_several_figures_is_read_from_the_worst():
    goal = report.Goal("C4", "the slowest op", "ops-x/.*/torch.*/ratio", at_least=1.0)
    found = of_ratios(("ops-x/scale/torch.a/ratio", 3.0), ("ops-x/cast/torch.b/ratio", 0.5), ("ops-x/y/read/ratio", 0))
    assert report.met_or_missed(goal, found) == ("at least 1", "cast: 0.5", "missed by 50%")


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


def test_the_page_has_every_figure():
    found = report.load()
    page = report.page(found)
    assert all(f"## {title}\n" in page for title in report.KINDS.values())
    for one in found:
        *side, _ = one["figure"].split("/")
        if side[0].split("-")[0] in report.KINDS:
            (line,) = (line for line in page.splitlines() if line.startswith(f"| {' | '.join(side)} |"))
            assert f" {one['value']} " in line
    (machine,) = {one["machine"] for one in found if one["figure"].startswith("tail-cpu-resnet50-O1-FusedAdam-clip/")}
    assert f"| tail-cpu-resnet50-O1-FusedAdam-clip | {machine} |" in page


def test_parts_are_printed_and_others_refused(csv, capsys):
    file = csv("f.csv", row(f"{TAIL}/torch-fused/ratio", 3, unit=""))
    report.main(["--csv", file, "goals"])
    assert "| C3 | step after backward at O2, tiny161 | at least 4 | 3 | missed by 25% |" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        report.main(["losses"])
    assert "losses is none of goals, gains" in capsys.readouterr().err


def test_the_picture_is_drawn_from_the_figures_at_hand(csv, tmp_path):
    image = pytest.importorskip("PIL.Image")
    rows = [row(f"tail-cpu-tiny{n}-O1-FusedAdam/tail/torch-fused/ratio", value) for n, value in ((1, 2.0), (2, 0.5))]
    report.main(["--csv", csv("f.csv", *rows), "--picture", str(tmp_path / "gains.png")])
    with image.open(tmp_path / "gains.png") as picture:
        assert picture.text["Description"] == "step after backward, small tensors: 2.0 0.5"


# --- figures that pages have in their own words -----------------------------------------------------------------------

UNIT = r"(?:ms|us|µs|ns|s|seconds|minutes|GB/s|times)(?!\w)"
IN_TEXT = re.compile(rf"(?<![\w.,^])\d[\d.,]*(?: (?:to|and|or) \d[\d.,]*)*(?: ?{UNIT}|x(?!\w))")
MADE = {ROOT / "docs" / "benchmarks.md"}
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted({*(ROOT / "docs").rglob("*.md")} - MADE)]
FOUND = report.load()


def values(pattern):
    return list(report.matching(FOUND, pattern).values())


def tails(name, device="cpu"):
    return values(f"tail-{device}-{name}-clip/tail/(ampctx|torch-fused)/time")


SLOWER = [
    of([1 / ratio for ratio in values(report.GROUPS[f"small GPT, {dtype}, against fp32"])])
    for dtype in ("bf16", "fp16")
    for of in (min, max)
]
# The line of a page, by some of its words, and what it says in numbers.
RECORDED = {
    ("README.md", "161 DTensors"): tails("tiny161-O1-FusedAdam-8"),
    ("README.md", "1,000 DTensors"): tails("tiny1000-O1-FusedAdam-8"),
    ("README.md", "GPT-2 small"): tails("gpt2-small-O2-FusedAdam"),
    ("README.md", "BERT-large"): tails("bert-large-O2-FusedAdam", "cuda"),
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


def test_figures_of_a_page_are_found():
    in_text = "It takes 27 ms, 3 times as long as `sleep 5 s`, with 4 tensors at O2; 1.2 to 1.5 times as long in fp16."
    by_columns = "| level | ms an iteration | bytes |\n| --- | --- | --- |\n| O0 | 17 | 12 |"
    by_rows = "| | ampctx | torch |\n| --- | --- | --- |\n| ms, 161 tensors | 3.1 | 9.0 |\n| tensors | 161 | 161 |"
    found = figures_of("\n\n".join((in_text, by_columns, by_rows)))
    assert list(found.values()) == [["27", "3", "1.2", "1.5"], ["17"], ["3.1", "9.0"]]


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


@pytest.mark.parametrize(
    ("page", "sentence", "group", "word"),
    [
        (
            "README.md",
            "Many small tensors step [faster than with torch's]",
            "step after backward, small tensors",
            "Faster",
        ),
        ("README.md", "On a CPU, fp16 [costs time]", "small GPT, fp16, against fp32", "Slower"),
        ("docs/levels.md", "On a CPU, fp16\n[costs time]", "small GPT, fp16, against fp32", "Slower"),
        (
            "docs/guide/fsdp_zero.md",
            "on a CPU [several times faster]",
            "the same, DTensors of one of 8 ranks",
            "Faster",
        ),
    ],
)
def test_a_page_says_what_the_figures_say(page, sentence, group, word):
    assert sentence in (ROOT / page).read_text()
    (line,) = (line for line in report.gains(FOUND) if f" {group} (" in line)
    assert line.startswith(f"- **{word}:**")


def test_a_page_says_how_many_tests_have_passed_on_a_gpu():
    (report_of_gpu,) = report.FIGURES.parent.glob("gpu-check-*.json")
    parts = json.loads(report_of_gpu.read_text())["parts"]
    passed = sum(part["counts"]["passed"] for name, part in parts.items() if name.startswith("tests-"))
    assert f"An H100: {passed:,} tests" in (report.ROOT / "docs" / "reliability.md").read_text()
