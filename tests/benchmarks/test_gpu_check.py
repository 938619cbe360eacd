"""gpu-check without a GPU: its report under all that can go wrong, and its checks of kernels on those of the CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import check_runner
import gpu_check
import gpu_exercise
import gpu_facts
import gpu_lists
import gpu_ranks
import gpu_steps
import graph_replay
import pytest
import torch
from check_runner import FAILED, MISSING, NOT_STARTED, OK, TIMED_OUT, Check, Part, Step

from ampctx import ops, optimizer_ops

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu_check.py"
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")


def command(*arguments, cwd=None):
    # The package of this tree; one thread, as several wait for each other on busy cores.
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-W", "error", str(SCRIPT), *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, env=env, timeout=300, cwd=cwd)


def python(check, code, **env):
    """A part's work: a child that runs this code."""
    return lambda limit: check.run_child([sys.executable, "-c", textwrap.dedent(code)], limit, **env)


def one(name, run, seconds=10.0, needs=None):
    return Step(name, seconds, lambda: [Part(name, run)], needs)


def report_of(check):
    return json.loads(check.report.read_text())


@pytest.fixture
def check(tmp_path):
    return Check(tmp_path / "out", 60.0, "the test")


# --- the script -------------------------------------------------------------------------------------------------------


@without_gpu
def test_without_a_gpu_the_report_says_so(tmp_path):
    before = {path: path.stat().st_mtime for path in (ROOT / "benchmarks" / "results").iterdir()}
    done = command("--out", "found", cwd=tmp_path)
    folder = tmp_path / "found"
    assert done.returncode == 3, done.stdout + done.stderr
    why = f"nothing has run: torch {torch.__version__} finds no CUDA device"
    assert done.stdout.splitlines()[-1].startswith(f"gpu-check: {why}")
    assert sorted(path.name for path in folder.iterdir()) == ["gpu-check.json", "gpu-check.log"]
    text = (folder / "gpu-check.json").read_text()
    report = json.loads(text)
    assert (report["exit_code"], report["summary"]) == (3, {"ok": ["facts"]})
    assert report["reason"].startswith(why)
    facts = report["facts"]
    assert (facts["torch"], facts["gpu"], facts["tools"]["pytest"]) == (torch.__version__, None, pytest.__version__)
    assert facts["sources"] == gpu_facts.sources()
    assert str(ROOT) not in text
    assert {path: path.stat().st_mtime for path in (ROOT / "benchmarks" / "results").iterdir()} == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--only build,tails",
            "--only: 'tails' is no step; the steps are build, exercise, tests, sanitize, graph, ranks, bench",
        ),
        ("--budget 0", "--budget: 0 seconds are not above 0"),
        (f"--out {SCRIPT}", "--out: "),
        ("--budget soon", "--budget: invalid seconds value: 'soon'"),
        ("exercise --device tpu", "--device: invalid choice: 'tpu'"),
        ("exercise --tensors 7,1", "--tensors: 1 tensors are too few, 2 is the least"),
        ("replay --iterations 0", "--iterations: 0 are none"),
    ],
)
def test_bad_arguments_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        gpu_check.main(arguments.split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@without_gpu
@pytest.mark.parametrize("what", ["exercise", "replay", "ranks"])
def test_a_missing_gpu_is_named(what, capsys):
    with pytest.raises(SystemExit) as ended:
        gpu_check.main([what])
    assert ended.value.code == 2
    assert "--device: cuda was asked for and torch finds no CUDA device here" in capsys.readouterr().err


# --- the report -------------------------------------------------------------------------------------------------------


def test_whatever_fails_the_report_has_the_rest(check):
    def raises(limit):
        raise ValueError("a fault of the step")

    def no_parts():
        raise KeyError("no such benchmark")

    check.run_steps(
        [
            one("raises", raises),
            Step("no parts", 1, no_parts),
            one("exits", python(check, "print('nearly'); raise SystemExit(7)")),
            one("killed", python(check, "import os; os.kill(os.getpid(), 9)")),
            one("missing", lambda limit: check.run_child(["ampctx-no-such-tool"], limit)),
            one("after a failure", python(check, "pass"), needs="exits"),
            one("works", python(check, "import os; print(os.environ['GIVEN'])", GIVEN="text"), needs="not run"),
        ]
    )
    parts = report_of(check)["parts"]
    assert {name: part["status"] for name, part in parts.items()} == {
        "raises": FAILED, "no parts": FAILED, "exits": FAILED, "killed": FAILED, "missing": MISSING,
        "after a failure": NOT_STARTED, "works": OK,
    }  # fmt: skip
    assert parts["raises"]["reason"] == "ValueError: a fault of the step"
    assert "no such benchmark" in parts["no parts"]["reason"]
    assert (parts["exits"]["exit_code"], parts["exits"]["last_lines"]) == (7, ["nearly"])
    assert parts["killed"]["exit_code"] == -signal.SIGKILL
    assert parts["missing"]["reason"] == "ampctx-no-such-tool cannot be run: No such file or directory"
    assert parts["after a failure"]["reason"] == "exits has not succeeded"
    assert parts["works"]["last_lines"] == ["text"]
    assert "nearly" in check.log.read_text()
    assert report_of(check)["summary"][MISSING] == ["missing"]


def test_a_child_out_of_time_ends_with_all_that_it_started(check):
    """And what it had printed is in the report."""
    code = """
        import subprocess, sys, time
        print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid, flush=True)
        time.sleep(60)
    """
    start = time.monotonic()
    check.run_part(Part("sleeps", python(check, code)), 1.5)
    part = report_of(check)["parts"]["sleeps"]
    assert time.monotonic() - start < 30
    assert (part["status"], part["exit_code"], part["reason"]) == (TIMED_OUT, None, "ended after its 2 s")
    (grandchild,) = part["last_lines"]
    state = Path(f"/proc/{grandchild}/stat")
    for _ in range(100):  # until it is reaped, or a zombie where nothing reaps
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.05)
    else:
        pytest.fail("the child of the child still runs")


def test_the_budget_is_shared_out(tmp_path):
    assert check_runner.share(540.0, [100, 40, 400]) == 100
    assert check_runner.share(270.0, [100, 40, 400]) == 50
    assert check_runner.share(-1.0, [1, 2]) == 0
    check, given = Check(tmp_path, 100.0, "the test"), {}

    def keeps(name):
        def run(limit):
            given[name] = limit
            return {"status": OK}

        return run

    check.run_steps(
        [
            Step("first", 30, lambda: [Part("0", keeps(0), weight=2), Part("1", keeps(1))]),
            one("last", keeps("last"), 10),
            Step("exact", 20, lambda: [Part("exact", keeps("exact"), seconds=7), Part("long", keeps("long"), 101)]),
        ]
    )
    # 30 of 60 for the first, two thirds of that for its first part; what is left goes on: 10 of 30, and then all.
    assert given == pytest.approx({0: 100 / 3, 1: 50, "last": 100 / 3, "exact": 7}, abs=0.5)
    assert check.parts["long"]["status"] == NOT_STARTED
    assert check.parts["long"]["reason"] in ("100 s left, it needs 101", "99 s left, it needs 101")


def test_nothing_starts_without_time(tmp_path):
    check = Check(tmp_path, 0.5, "the test")
    check.run_steps([one("late", python(check, "pass"))])
    part = report_of(check)["parts"]["late"]
    assert part == {"status": NOT_STARTED, "reason": "0 s left, it needs 1"}


@pytest.mark.full
@without_gpu
def test_a_report_that_is_of_no_use_to_resume_is_kept(tmp_path):
    before = {"facts": {"gpu": "NVIDIA H100"}, "parts": {"facts": {"status": OK}, "exercise": {"status": OK}}}
    (tmp_path / "gpu-check.json").write_text(json.dumps(before))
    done = command("--resume", "--out", tmp_path)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "gpu-check.before.json is of other sources, another torch or another GPU; all runs anew" in done.stdout
    assert json.loads((tmp_path / "gpu-check.before.json").read_text()) == before
    assert json.loads((tmp_path / "gpu-check.json").read_text())["summary"] == {OK: ["facts"]}


def test_resume_after_facts_that_fail_keeps_the_report(tmp_path):
    """Here for want of time."""
    facts = dict.fromkeys(gpu_facts.IDENTITY, "same")
    before = {"facts": facts, "parts": {"facts": {"status": OK}, "exercise": {"status": OK}}}
    check = Check(tmp_path, 0.5, "the test")
    assert gpu_check.run(check, before, None) == gpu_check.NOT_WELL
    gpu_check.finish(check, 1, False)
    report = gpu_check.earlier(check.report)
    assert (report["facts"], report["summary"]) == (facts, {OK: ["exercise"], NOT_STARTED: ["facts"]})


def test_resume_runs_what_has_not_succeeded(tmp_path, capsys):
    marks, facts = tmp_path / "marks", dict.fromkeys(gpu_facts.IDENTITY, "same")

    def run(fails, before, facts):
        check = Check(tmp_path / "out", 60.0, "the test")
        check.about["facts"] = facts
        check.record("facts", {"status": OK})
        if before:
            gpu_check.resume(check, before, facts)
        code = "import sys; open({!r}, 'a').write({!r}); sys.exit({})"
        steps = [one(n, python(check, code.format(str(marks), n, int(n in fails)))) for n in ("a", "b", "c")]
        check.run_steps(steps)
        ran = marks.read_text() if marks.exists() else ""
        marks.unlink(missing_ok=True)
        return ran, gpu_check.earlier(check.report)

    ran, report = run("b", None, facts)
    assert (ran, report["summary"]) == ("abc", {OK: ["facts", "a", "c"], FAILED: ["b"]})
    ran, report = run("", report, facts)
    assert (ran, report["summary"]) == ("b", {OK: ["facts", "a", "c", "b"]})
    assert [report["parts"][name].get("kept", False) for name in "abc"] == [True, False, True]
    for name in gpu_facts.IDENTITY:
        assert run("", report, {**facts, name: "other"})[0] == "abc"
        assert gpu_check.earlier(tmp_path / "out" / "gpu-check.before.json") == report
        assert "--resume: gpu-check.before.json is of other sources" in capsys.readouterr().out
    assert run("", report, facts)[0] == ""
    assert gpu_check.earlier(tmp_path / "none.json") is None
    # A build is looked at again: another machine has none.
    report["parts"] |= {"build": {"status": OK}}
    assert list(gpu_check.kept(report, facts)) == ["a", "c", "b"]


INTERRUPTIBLE = """
import sys
sys.path[:0] = [{benchmarks!r}]
from pathlib import Path
import gpu_check
from check_runner import Check, Part, Step, Interrupted, ended_by_signals
check = Check(Path({out!r}), 60.0, "the test")
def child(code):
    return lambda limit: check.run_child([sys.executable, "-c", code], limit)
done = Step("done", 1, lambda: [Part("done", child("pass"))])
sleeps = Step("sleeps", 1, lambda: [Part("sleeps", child("import os, time; print(os.getpid()); time.sleep(60)"))])
with ended_by_signals():
    try:
        check.run_steps([done, sleeps])
    except Interrupted as signalled:
        check.about["reason"] = str(signalled)
    gpu_check.finish(check, 1, False)
sys.exit(1)
"""


def interrupted(tmp_path, number):
    """The report, exit code and child of a check that a signal ends within its second part."""
    code = INTERRUPTIBLE.format(benchmarks=str(SCRIPT.parent), out=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    output, end = tmp_path / "children" / "output.txt", time.monotonic() + 60
    report = tmp_path / "gpu-check.json"
    while not (report.exists() and output.exists() and output.read_text().strip()):
        assert time.monotonic() < end
        time.sleep(0.02)
    child = int(output.read_text())
    process.send_signal(number)
    code = process.wait(30)
    return json.loads(report.read_text()), code, Path(f"/proc/{child}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_child_and_leaves_a_report(tmp_path, number):
    report, code, child = interrupted(tmp_path, number)
    assert code == 1
    assert not child.exists()
    assert report["reason"] == f"ended by {number.name}"
    assert {name: part["status"] for name, part in report["parts"].items()} == {"done": OK, "sleeps": "interrupted"}


def test_what_was_done_is_there_after_a_kill(tmp_path):
    report, code, child = interrupted(tmp_path, signal.SIGKILL)
    os.killpg(int(child.name), signal.SIGKILL)  # nobody else could
    assert code == -signal.SIGKILL
    assert report["summary"] == {OK: ["done"]}


def test_a_long_output_is_shortened_in_its_middle():
    text = check_runner.shortened("a" * 300 + "b" * 300, 90)
    assert text == f"{'a' * 30}\n... 510 characters left out ...\n{'b' * 60}"
    assert check_runner.shortened("short", 90) == "short"


# --- the steps --------------------------------------------------------------------------------------------------------


def gpu(check, **tools):
    facts = {"capability": [9, 0], "tools": {"pytest": "8", **tools}}
    return gpu_steps.GpuCheck(check, facts)


@pytest.mark.full
@without_gpu
@pytest.mark.skipif("/" in gpu_facts.cuda_tool("compute-sanitizer"), reason="compute-sanitizer is installed here")
def test_missing_tools_are_lines_of_the_report(check, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    library = ROOT / "ampctx" / "_ops.so"
    before = library.stat().st_mtime
    check.run_part(Part("build", gpu(check).build), 60)
    check.run_part(Part("sanitize", lambda limit: gpu(check).sanitize_with("memcheck", limit)), 60)
    check.run_part(Part("tests", lambda limit: gpu(check, pytest=None).test_group("tests", [], limit)), 60)
    parts = report_of(check)["parts"]
    assert [part["status"] for part in parts.values()] == [MISSING] * 3
    assert "AMPCTX_CUDA=1, but nvcc was not found" in parts["build"]["reason"]
    assert "compute-sanitizer cannot be run: No such file" in parts["sanitize"]["reason"]
    assert parts["tests"]["reason"] == "pytest is not installed"
    assert library.stat().st_mtime == before


CRASHING = """
    import os, pytest
    pytestmark = pytest.mark.cuda
    def test_passes(): pass
    def test_fails(): assert False
    def test_crashes(): os.abort()
    def test_loses_the_context(): raise RuntimeError("CUDA error: an illegal memory access was encountered")
    @pytest.mark.skip
    def test_is_skipped(): pass
    def test_passes_later(): pass
"""


def run_group(check, tmp_path, code, limit=60.0):
    file = tmp_path / "test_group.py"
    file.write_text(textwrap.dedent(code))
    check.run_part(Part("group", lambda seconds: gpu(check).test_group("group", [str(file)], seconds)), limit)
    return report_of(check)["parts"]["group"]


def test_a_crash_costs_its_own_test_alone(check, tmp_path):
    part = run_group(check, tmp_path, CRASHING)
    assert (part["status"], part["processes"]) == (FAILED, 3)
    counts = {name: part[name] for name in ("collected", "passed", "failed", "skipped", "not_run")}
    assert counts == {"collected": 6, "passed": 2, "failed": 3, "skipped": 1, "not_run": 0}
    failing = [name.rpartition("::")[2] for name in part["failing"]]
    assert failing == ["test_fails", "test_crashes", "test_loses_the_context"]


@pytest.mark.full
def test_a_group_out_of_time_still_counts(check, tmp_path):
    code = """
        import pytest, time
        pytestmark = pytest.mark.cuda
        def test_passes(): pass
        def test_hangs(): time.sleep(60)
        def test_late(): pass
    """
    part = run_group(check, tmp_path, code, limit=10.0)
    assert (part["status"], part["passed"], part["not_run"]) == (TIMED_OUT, 1, 2)
    assert [name.rpartition("::")[2] for name in part["running"]] == ["test_hangs"]


@pytest.mark.full(but=1)
@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("import pytest\n@pytest.mark.cuda\ndef test_passes(): pass", OK),
        ("def test_of_the_cpu(): pass", FAILED),  # a group that is empty tests nothing
        ("import ampctx_no_such_module", FAILED),
    ],
)
def test_a_group_succeeds_if_all_its_tests_do(check, tmp_path, code, status):
    assert run_group(check, tmp_path, code)["status"] == status


def test_each_test_is_in_one_group():
    paths = [path for _, group in gpu_steps.TESTS.values() for path in group.split()]
    ignored = {path.removeprefix("--ignore=") for path in paths if path.startswith("--ignore=")}
    taken = {path for path in paths if not path.startswith("--ignore=")} - {"tests"}
    assert ignored == taken, "what one group leaves out is in another"
    assert all((ROOT / path).exists() for path in taken)


def test_which_extension_serves_a_gpu():
    found = {"backends": ["cpu", "cuda"], "cuda_archs": ["sm_80", "sm_100", "compute_100"], "is_current": True}
    assert [gpu_facts.serves(found, [8, n]) for n in (0, 6)] == [True, True]
    assert [gpu_facts.serves(found, version) for version in ([7, 5], [9, 0], [10, 0], [12, 0])] == [
        False, False, True, False,
    ]  # fmt: skip
    assert not gpu_facts.serves({**found, "is_current": False}, [8, 0])
    assert not gpu_facts.serves({**found, "backends": ["cpu"]}, [8, 0])
    here = gpu_facts.extension()
    assert here["backends"] == list(ops.extension.backends)


def test_benchmarks_go_from_short_to_long_with_the_peers_that_are_there(check):
    parts = gpu(check).bench()
    seconds = [part.seconds for part in parts]
    assert len(parts) == len({part.name for part in parts}) > 20
    assert seconds == sorted(seconds)
    words = ["tail.py", "--optimizer", "FusedAdam", "--json", "x"]
    assert gpu_steps.with_peers(words, lambda name: []) == words
    assert gpu_steps.with_peers(words, lambda name: ["apex"]) == [*words, "--against", "torch-fused,apex"]
    against = ["tail.py", "--against", "torch-default", "--optimizer", "FusedAdam"]
    assert gpu_steps.with_peers(against, lambda name: ["apex", "te"])[2] == "torch-default,apex,te"


# --- what runs on the GPU, here on the CPU ----------------------------------------------------------------------------


@pytest.mark.parametrize("counts", ["7", pytest.param("7,300", marks=pytest.mark.full)])
def test_the_exercise_runs_on_the_cpu(tmp_path, counts):
    file = tmp_path / "exercise.json"
    done = command("exercise", "--device", "cpu", "--tensors", counts, "--json", file)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("exercise: starts work after")
    found = json.loads(file.read_text())["tensors"]
    assert list(found) == counts.split(",")
    assert all(of_count["checks"] > 1500 for of_count in found.values())


NOT_INSTALLED = """
import importlib.util, pathlib, runpy, sys
script = pathlib.Path(sys.argv[1])
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
sys.path = [path for path in sys.path if path and pathlib.Path(path).resolve() != script.parents[1]]
assert importlib.util.find_spec("ampctx") is None
sys.path.insert(0, str(script.parent))
sys.argv = [str(script), "exercise", "--device", "cpu", "--tensors", "7"]
runpy.run_path(str(script), run_name="__main__")
"""


@pytest.mark.full
def test_a_checkout_need_not_be_installed(tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [sys.executable, "-c", NOT_INSTALLED, str(SCRIPT)]
    done = subprocess.run(words, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("count", [2, 7, 63, 64, 300, 2500])
def test_lists_have_edges_and_guards(count):
    sizes = [gpu_lists.sizes(count, turn) for turn in range(3)]
    assert {len(of_turn) for of_turn in sizes} == {count}
    if count >= 7:
        assert set(gpu_lists.EDGES) <= {size for of_turn in sizes for size in of_turn}
    layout = gpu_lists.Layout(sizes[0], torch.device("cpu"))
    values = torch.randn(layout.elements)
    for odd in (False, True):
        made = layout.make(values, odd)
        assert [t.numel() for t in made.tensors] == sizes[0]
        assert torch.equal(torch.cat(made.tensors), values)
        assert torch.equal(made.flat(), values)
        offsets = {t.storage_offset() % 16 for t in made.tensors}
        assert offsets == {pair[odd] for pair in gpu_lists.OFFSETS[:count]}
        assert made.is_intact()
    if count >= 64:
        first = next(t for t in made.tensors if t.numel())
        first.as_strided((1,), (1,), first.storage_offset() - 1).fill_(1.0)
        assert not made.is_intact()
    norms = [torch.linalg.vector_norm(t.double()).item() for t in made.tensors]
    assert layout.norms(values).tolist() == pytest.approx(norms)


def _beyond(call):
    def scale(src, dst, *others):
        call(src, dst, *others)
        first = next(t for t in dst if t.numel() > 100)
        first.as_strided((1,), (1,), first.storage_offset() - 1).fill_(3.0)

    return scale


def _unflagged(call):
    return lambda src, dst, flag, *others: call(src, dst, torch.zeros_like(flag), *others)


def _stale(call):
    def step(grads, params, *others, **options):
        before = [p.clone() for p in params]
        call(grads, params, *others, **options)
        params[-2][-1] = before[-2][-1]

    return step


def _counts_too_far(call):
    def step(*arguments, **options):
        call(*arguments, **options)
        arguments[-4][3].add_(1)

    return step


@pytest.mark.full(but=3)
@pytest.mark.parametrize(
    ("module", "name", "fault", "told"),
    [
        (ops, "multi_tensor_scale", _beyond, "memory around list"),
        (ops, "multi_tensor_scale", _unflagged, "inf at 0 is flagged"),
        *((optimizer_ops, n, _stale, f"{n}, ") for n in ("adam", "sgd", "adagrad", "lion", "muon", "novograd")),
        (optimizer_ops, "lamb", _stale, "nvlamb, split"),
        (optimizer_ops, "adam", _counts_too_far, "numbers after an overflow"),
    ],
)
def test_the_exercise_notices_a_fault(monkeypatch, module, name, fault, told):
    monkeypatch.setattr(module, name, fault(getattr(module, name)))
    checks = gpu_lists.Checks()
    exercise = gpu_exercise.Exercise(gpu_lists.sizes(100, 0), torch.bfloat16, torch.device("cpu"), checks)
    with pytest.raises(AssertionError, match="checks failed") as raised:
        exercise.run()
    assert told in str(raised.value)


def test_the_replay_agrees_with_the_rule_on_the_cpu(tmp_path):
    file = tmp_path / "replay.json"
    done = command("replay", "--device", "cpu", "--iterations", "97", "--json", file)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    # 10 clean updates complete the 2,000 that the scale grows after, and one overflow halves it.
    assert (found["iterations"], found["skipped_steps"], found["loss_scale"]) == (97, 1, 2.0**16)
    assert found["tensors_compared"] == 2 * 6 + 3 * 6


def test_the_replay_notices_what_differs():
    loops = [graph_replay.Loop(torch.device("cpu"), 2) for _ in range(2)]
    for loop in loops:
        loop.run(0, 2, loop.iterate)
    assert graph_replay.check(*loops, 2)["skipped_steps"] == 0
    with pytest.raises(AssertionError, match="eager: skipped steps and loss scale are"):
        graph_replay.check(*loops, 200)
    with torch.no_grad():
        next(loops[1].model.parameters()).view(-1)[0] += 1
    with pytest.raises(AssertionError, match="eager and replayed results differ"):
        graph_replay.check(*loops, 2)
    with torch.no_grad():
        next(loops[1].model.parameters()).view(-1)[0] = float("inf")
    with pytest.raises(AssertionError, match="are not finite"):
        graph_replay.check(*loops, 2)
    for loop in loops:
        loop.session.reset()


@pytest.mark.full
def test_ranks_train_together_on_the_cpu(tmp_path):
    file = tmp_path / "ranks.json"
    done = command("ranks", "--device", "cpu", "--json", file)
    assert done.returncode == 0, done.stdout + done.stderr
    cases = json.loads(file.read_text())["gloo, 2 ranks"]["cases"]
    assert len(cases) == 2
    assert all(set(found) > {"ddp O2", "sharded O5", "uneven"} for found in cases)


def test_ranks_that_fail_are_noticed():
    fine, failed = ('{"ddp O1": "ok"}\n', ""), ("", "AssertionError: masters differ from those of ranks [1]")
    assert gpu_ranks.found_by([0, 0], [fine, fine]) == {"cases": [{"ddp O1": "ok"}] * 2}
    with pytest.raises(AssertionError, match="masters differ"):
        gpu_ranks.found_by([0, 1], [fine, failed])
    refusal = ("", "ncclInvalidUsage: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000")
    assert gpu_ranks.found_by([1, -9], [refusal, failed]) == {"refused": "two processes on one GPU"}


def test_the_rule_of_the_replay():
    assert graph_replay.rule(9) == (0, 2.0**16)
    assert graph_replay.rule(10) == (0, 2.0**17)
    assert graph_replay.rule(1003) == (10, 2.0**7)
