"""What is made of the benchmarks' reports: comparisons, the pages of the docs, the plots."""

from __future__ import annotations

import json
import re

import compare
import measuring
import plot
import pytest
import report
import suite
from PIL import Image


def a_report(ours, theirs, case="tail", **more):
    """A report whose samples are given; the ratio is taken round by round, as a benchmark does."""
    samples = {"ampctx": {"ms": ours}, "torch-fused": {"ms": theirs}}
    what = {"ampctx": "FusedAdam", "torch-fused": "torch.optim.AdamW(fused=True)"}
    found = measuring.case(samples, what, tensors=8, elements=100, **more)
    return {
        "benchmark": "tail",
        "command": "python benchmarks/tail.py",
        **measuring.environment("cpu"),
        "commit": "c" * 40 + "-dirty",
        "rounds": len(ours),
        "cases": {case: found},
    }


BASE = a_report([10.0, 10.1, 10.2, 10.3], [20.0, 20.2, 20.4, 20.6])


@pytest.fixture
def write(tmp_path):
    def write(name, content):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))
        return str(path)

    return write


def test_a_case_has_medians_quartiles_and_ratios_by_round():
    samples = {
        "ampctx": {"ms": [1.0, 2.0, 4.0], "exit": [0.5, 1.0, 2.0]},
        "torch": {"ms": [3.0, 2.0, 8.0]},
        "bandwidth": {"copy": [5.0, 6.0, 7.0], "in place": [8.0, 10.0, 9.0]},
    }
    found = measuring.case(samples, {"ampctx": "a", "torch": "t"}, floor_bytes=10**7, tensors=3)
    assert found["sides"]["ampctx"]["ms"] == {"median": 2.0, "q1": 1.5, "q3": 3.0, "samples": [1.0, 2.0, 4.0]}
    assert found["sides"]["ampctx"]["parts_ms"]["exit"]["median"] == 1.0
    assert found["sides"]["torch"]["over_ampctx"]["samples"] == [3.0, 1.0, 2.0]
    assert found["floor"] == {"bytes": 10**7, "ms": 1.0}  # at the fastest pass, 10 GB/s
    assert (found["sides"]["ampctx"]["share_of_floor"], found["sides"]["torch"]["share_of_floor"]) == (0.5, 0.3333)
    assert found["tensors"] == 3


def test_rounds_are_interleaved_and_warmed_up():
    calls = []
    contenders = {who: lambda n, who=who: calls.append((n, who)) or {"ms": float(n)} for who in "abc"}
    samples = measuring.interleave(contenders, 4)
    assert samples == {who: {"ms": [0.0, 1.0, 2.0, 3.0]} for who in "abc"}
    rounds = [[who for n, who in calls if n == number] for number in range(-measuring.WARMUP_ROUNDS, 4)]
    assert [n for n, _ in calls] == sorted(n for n, _ in calls)
    assert all(sorted(order) == ["a", "b", "c"] for order in rounds)
    assert len(set(map(tuple, rounds))) > 1


def test_the_middle_run_is_kept_case_by_case():
    runs = [a_report([1.0, 1.0], [ratio, ratio]) for ratio in (3.0, 1.0, 2.0, 4.0)]
    joined = measuring.middle_run(runs)
    case = joined["cases"]["tail"]
    assert (joined["runs"], case["ratios_of_runs"]) == (4, [3.0, 1.0, 2.0, 4.0])
    assert case["sides"]["torch-fused"]["over_ampctx"]["median"] == 2.0


# --- compare ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "verdict"),
    [
        pytest.param([12.0, 12.1, 12.2, 12.3], "slower", id="beyond-the-spread"),
        pytest.param([8.0, 8.1, 8.2, 8.3], "faster", id="faster"),
        pytest.param([10.0, 10.2, 14.0, 15.0], "", id="spreads-touch"),
    ],
)
def test_a_change_beyond_the_spread_is_marked(samples, verdict):
    ours, theirs = compare.rows("tail", BASE, a_report(samples, [20.0, 20.2, 20.4, 20.6]))
    assert (ours.side, ours.verdict, ours.ratios) == ("ampctx", verdict, None)
    assert ours.change == pytest.approx(sum(samples[1:3]) / 2 / 10.15)
    assert (theirs.side, theirs.verdict, theirs.ratios[0]) == ("torch-fused", "", pytest.approx(2.0))


@pytest.mark.parametrize(
    ("samples", "limit", "code"),
    [
        pytest.param([12.0, 12.1, 12.2, 12.3], ["--fail-on-regression", "5"], 1, id="more-than-5-percent"),
        pytest.param([12.0, 12.1, 12.2, 12.3], ["--fail-on-regression", "30"], 0, id="less-than-30-percent"),
        pytest.param([12.0, 12.1, 12.2, 12.3], [], 0, id="no-limit"),
        pytest.param([10.0, 10.2, 14.0, 15.0], ["--fail-on-regression", "5"], 0, id="within-the-spread"),
        pytest.param([8.0, 8.1, 8.2, 8.3], ["--fail-on-regression", "0"], 0, id="faster"),
    ],
)
def test_exit_code_of_compare(samples, limit, code, write, capsys):
    new = a_report(samples, [20.0, 20.2, 20.4, 20.6])
    assert compare.main([write("old.json", BASE), write("new.json", new), *limit]) == code
    out = capsys.readouterr().out
    assert ("slower by 19.7%, more than 5%" in out) == bool(code)
    assert f"{new['cases']['tail']['sides']['ampctx']['ms']['median']:.3f}" in out


def test_a_slower_peer_is_no_regression(write):
    new = a_report([10.0, 10.1, 10.2, 10.3], [40.0, 41.0, 42.0, 43.0])
    assert compare.main([write("old.json", BASE), write("new.json", new), "--fail-on-regression", "0"]) == 0


def test_compare_takes_folders(write, tmp_path, capsys):
    slow = a_report([12.0, 12.1, 12.2, 12.3], [20.0, 20.2, 20.4, 20.6])
    for folder, content in (("old", BASE), ("new", slow)):
        write(f"{folder}/tail-a.json", content)
        write(f"{folder}/{folder}.json", content)
        write(f"{folder}/other.json", {"found": 1})
    assert compare.main([str(tmp_path / "old"), str(tmp_path / "new"), "--fail-on-regression", "5"]) == 1
    assert capsys.readouterr().out.count("tail-a tail") == 3  # two sides, and the regression


def test_compare_tells_of_another_machine(write, capsys):
    new = {**BASE, "machine": {**BASE["machine"], "cpu": "another"}}
    compare.main([write("old.json", BASE), write("new.json", new)])
    out = capsys.readouterr().out
    assert "another machine" in out
    assert "another versions" not in out


def test_compare_refuses(write, tmp_path, capsys):
    base = write("old.json", BASE)
    other = write("case.json", a_report([1.0, 1.0], [1.0, 1.0], case="unscale"))
    for arguments, message in (
        ((base, write("soak.json", {"found": 1})), "soak.json is no report of a benchmark: it has no cases"),
        ((base, str(tmp_path / "none.json")), "none.json"),
        ((base, str(tmp_path)), "are a folder and a file"),
        ((base, other), "have no case in common"),
    ):
        with pytest.raises(SystemExit) as ended:
            compare.main(list(arguments))
        assert ended.value.code == 2
        assert message in capsys.readouterr().err


# --- the pages and the plots ------------------------------------------------------------------------------------------


PERFORMANCE = report.ROOT / "docs" / "performance.md"
GOALS = report.ROOT / "benchmarks" / "GOALS.md"


@pytest.mark.parametrize("page", report.PAGES, ids=lambda page: page.name)
def test_pages_have_the_figures_of_the_reports(page):
    text = page.read_text()
    assert text == report.replaced(page, text, report.reports(report.RESULTS)), "run: python benchmarks/report.py"


def test_text_between_the_tables_is_kept():
    text = GOALS.read_text().replace("<!-- end of goals -->", "<!-- end of goals -->\nBy hand.")
    emptied = report.replaced(GOALS, text, {})
    assert "<!-- end of goals -->\nBy hand." in emptied
    assert emptied.count("not recorded") == len(report.GOALS)
    assert report.replaced(GOALS, emptied, report.reports(report.RESULTS)) == text


def test_a_page_without_marks_is_refused():
    with pytest.raises(ValueError, match="performance.md has marks for nothing; expected gains, picture, levels"):
        report.replaced(PERFORMANCE, "# Performance\n", {})


def test_measured_figures_are_not_written_by_hand():
    """What is measured changes with `make bench`, so all of it stands where report.py writes."""
    for page in (PERFORMANCE, GOALS):
        assert re.findall(r"\d+\.\d+|\d+ ?%|\d+ ms", report.by_hand(page.read_text())) == []


@pytest.mark.parametrize(
    ("theirs", "told"),
    [
        pytest.param([2.0, 3.0], "- **Faster:** step after backward, small tensors (2.00 to 3.00).", id="faster"),
        pytest.param([0.96, 1.04], "- **Level:** step after backward, small tensors (0.96 to 1.04).", id="level"),
        pytest.param([0.5, 0.5], "- **Slower:** step after backward, small tensors (0.50).", id="slower"),
        pytest.param([0.5, 2.0], "- **Faster or slower:** step after backward, small tensors (0.50 to 2.00", id="both"),
    ],
)
def test_gains_are_called_what_they_are(theirs, told):
    found = {f"tail-cpu-tiny{i}": a_report([1.0, 1.0], [ratio, ratio]) for i, ratio in enumerate(theirs)}
    found["tail-cuda-tiny0"] = a_report([1.0, 1.0], [9.0, 9.0])
    lines = list(report.gains(found))
    assert lines[0].startswith(told)
    assert lines[1].startswith("- **Not recorded:** step after backward, ResNet-50; the same, LAMB,")
    assert report.rows(found) == [("step after backward, small tensors", theirs)]


def test_gains_count_the_goals_that_are_missed():
    told = "- **Goals:** [{} of " + str(len(report.GOALS)) + " are missed](../benchmarks/GOALS.md)."
    assert told.format(0) in report.gains({})
    missed = {"tail-cpu-resnet50-O1-FusedAdam": a_report([1.0, 1.0], [1.1, 1.1])}
    assert told.format(1) in report.gains(missed)
    reached = {"tail-cpu-resnet50-O1-FusedAdam": a_report([1.0, 1.0], [9.0, 9.0])}
    assert told.format(0) in report.gains(reached)


def test_goals_say_by_how_much_they_are_missed():
    goal = report.Goal("C2", "a tail", "tail-x", "tail", "torch-fused", at_least=2.5)
    found = {"tail-x": a_report([1.0, 1.0], [2.0, 2.0])}
    assert report.verdict(goal, found) == ("at least 2.5", "2.00 (2.00 to 2.00)", "missed by 20%")
    found = {"tail-x": a_report([1.0, 1.0], [2.5, 2.5])}
    assert report.verdict(goal, found)[2] == "reached"
    assert report.verdict(goal, {}) == ("at least 2.5", "not recorded", "")
    limit = report.Goal("G8", "host time", "tail-x", "tail", at_most=0.3, figure="us_per_further_tensor")
    assert report.verdict(limit, found) == ("at most 0.3 us", "not recorded", "")
    found["tail-x"]["cases"]["tail"]["sides"]["ampctx"]["us_per_further_tensor"] = 1.5
    assert report.verdict(limit, found) == ("at most 0.3 us", "1.5 us", "missed, 5.0 times as much")
    found["tail-x"]["cases"]["tail"]["sides"]["ampctx"]["us_per_further_tensor"] = 0.3
    assert report.verdict(limit, found)[2] == "reached"
    limit = report.Goal("G8", "host time", "tail-x", "tail", at_most=0.5, figure="ms")
    assert report.verdict(limit, found) == ("at most 0.5 ms", "1.00 (1.00 to 1.00) ms", "missed, 2.0 times as much")


def test_a_goal_for_several_cases_is_read_from_the_worst():
    found = {"ops-x": a_report([1.0, 1.0], [3.0, 3.0], case="scale")}
    found["ops-x"]["cases"] |= a_report([1.0, 1.0], [0.5, 0.5], case="cast")["cases"]
    goal = report.Goal("C4", "the slowest op", "ops-x", ".*", "torch.*", at_least=1.0)
    assert report.verdict(goal, found) == ("at least 1", "cast: 0.50 (0.50 to 0.50)", "missed by 50%")
    found["ops-x"]["cases"].pop("cast")
    assert report.verdict(goal, found) == ("at least 1", "3.00 (3.00 to 3.00)", "reached")


def test_goals_are_read_from_reports_that_the_suite_writes():
    written = {entry.file: entry for entry in suite.entries("cpu")}
    for goal in report.GOALS:
        assert written[goal.file].goal, goal


def test_committed_figures_are_those_the_suite_writes():
    entries = {entry.file: entry for device in ("cpu", "cuda") for entry in suite.entries(device)}
    for name, found in report.reports(report.RESULTS).items():
        assert name in entries, f"{name}.json is not written by make bench"
        assert found["benchmark"] == entries[name].script


def test_what_the_suite_writes_leaves_a_commit_clean():
    assert {str(page.relative_to(report.ROOT)) for page in report.PAGES} < set(measuring.WRITTEN)
    assert f"docs/{report.GAINS_PNG}" in measuring.WRITTEN


def test_the_plot_is_a_png(tmp_path, write, capsys):
    write("tail-a.json", BASE)
    host = a_report([1.0, 1.0], [2.0, 2.0], case="8 tensors")
    loop = a_report([1.0, 1.0], [2.0, 2.0], case="O1")
    for side in ("ampctx", "torch-fused"):
        host["cases"]["8 tensors"]["sides"][side]["us_per_tensor"] = 1.0
        loop["cases"]["O1"]["sides"][side]["peak_MB"] = 1.0
    write("host-a.json", host)
    write("loop-a.json", loop)
    plot.main(["--results", str(tmp_path), "--output", str(tmp_path / "bench.png")])
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert "wrote" in capsys.readouterr().out


def test_the_plot_needs_reports(tmp_path, capsys):
    with pytest.raises(SystemExit):
        plot.main(["--results", str(tmp_path)])
    assert "has no report of a benchmark" in capsys.readouterr().err


def test_the_picture_shows_the_figures_of_the_reports():
    found = report.reports(report.RESULTS)
    assert len(report.rows(found)) == len(report.GROUPS)
    with Image.open(report.ROOT / "docs" / report.GAINS_PNG) as picture:
        assert picture.text["Description"] == plot.described(found), "run: make bench, or plot.py --gains"


def test_the_picture_is_drawn_from_the_reports_at_hand(tmp_path, write, capsys):
    for number, theirs in enumerate((20.0, 5.0)):
        write(f"tail-cpu-tiny{number}.json", a_report([10.0, 10.0], [theirs, theirs]))
    arguments = ["--results", str(tmp_path), "--output", str(tmp_path / "all.png"), "--gains", str(tmp_path / "g.png")]
    plot.main(arguments)
    with Image.open(tmp_path / "g.png") as picture:
        assert picture.text["Description"] == "step after backward, small tensors: 2.0 0.5"
    for path in tmp_path.glob("tail-*.json"):
        path.rename(tmp_path / path.name.replace("cpu", "cuda"))
    with pytest.raises(SystemExit):
        plot.main(arguments)
    assert "has none of the comparisons that the picture shows" in capsys.readouterr().err
