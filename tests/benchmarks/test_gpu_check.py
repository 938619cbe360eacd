"""gpu-check without a GPU: its report, whatever goes wrong; the exercise of the kernels on those of the CPU."""

from __future__ import annotations

import fcntl
import json
import sys
import textwrap
from pathlib import Path

import gpu_check
import pytest
import suite
import torch
from gpu_check import FAILED, NOT_STARTED, OK, RUNNING, TIMED_OUT, Check

sys.path.append(str(gpu_check.ROOT / "tests" / "ptx"))
import exercise

from ampctx import ops, optimizer_ops

FACTS = {"commit": "c" * 40, "changed": "", "torch": torch.__version__, "gpu": None}


@pytest.fixture
def check(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    return Check(tmp_path / "gpu-check.json", FACTS, 600.0, "the test")


def report_of(check):
    return json.loads(check.file.read_text())


def python(check, code):
    return lambda limit: check.child(limit, sys.executable, "-c", code)[0]


# --- the script -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_gpu_the_report_says_so(tmp_path, capsys):
    before = sorted((gpu_check.ROOT / "benchmarks" / "results").iterdir())
    assert gpu_check.main(["--out", str(tmp_path / "found.json")]) == 3
    assert capsys.readouterr().out.endswith(f"nothing has run: torch {torch.__version__} finds no CUDA device\n")
    report = json.loads((tmp_path / "found.json").read_text())
    assert (report["facts"]["torch"], report["facts"]["gpu"], report["parts"]) == (torch.__version__, None, {})
    assert sorted((gpu_check.ROOT / "benchmarks" / "results").iterdir()) == before


@pytest.mark.parametrize("name", ["tails", "tests-op", "bench-tail-cuda-resnet"])
def test_a_part_that_is_none_is_refused(name, capsys):
    with pytest.raises(SystemExit) as ended:
        gpu_check.main(["--only", f"build,{name}"])
    assert ended.value.code == 2
    assert f"--only: {name} is none of build, exercise, tests, sanitize, bench" in capsys.readouterr().err


def test_a_part_has_parts():
    names = gpu_check.parts()
    assert [name for name in names if gpu_check.is_of(name, ["tests-ops", "bench-host-cuda"])] == [
        "tests-ops", "bench-host-cuda-O1", "bench-host-cuda-O2"
    ]  # fmt: skip


def test_a_run_of_some_parts_ends_with_those_that_are_not_ok(tmp_path, monkeypatch, capsys):
    """On a GPU that facts makes up: without CUDA here the build ends, and nothing after it is started."""
    monkeypatch.setattr(gpu_check, "facts", lambda: {**FACTS, "gpu": "A GPU", "capability": "90"})
    monkeypatch.setattr(Check, "build", lambda check: check.part("build", 600.0, python(check, "raise SystemExit(5)")))
    out = tmp_path / "found.json"
    assert gpu_check.main(["--out", str(out), "--only", "build,exercise"]) == 1
    assert capsys.readouterr().out.endswith("gpu-check: build (failed)\n")
    assert list(json.loads(out.read_text())["parts"]) == ["build"]


# --- parts ------------------------------------------------------------------------------------------------------------


def test_each_part_is_in_the_report_at_once(check, capsys):
    def looks(limit):
        assert report_of(check)["parts"] == {"fails": check.parts["fails"], "looks": {"status": RUNNING}}
        return {"status": OK}

    assert not check.part("fails", 600.0, python(check, "print('why'); raise SystemExit(4)"))
    assert check.part("looks", 600.0, looks)
    assert not check.part("raises", 600.0, lambda limit: {}["no such benchmark"])
    assert not check.part("missing", 600.0, lambda limit: check.child(limit, "no-such-tool")[0])
    parts = report_of(check)["parts"]
    assert [part["status"] for part in parts.values()] == [FAILED, OK, FAILED, FAILED]
    assert (parts["fails"]["exit_code"], parts["fails"]["last_lines"]) == (4, ["why"])
    assert parts["raises"]["reason"] == "KeyError: 'no such benchmark'"
    assert parts["missing"]["reason"].startswith("FileNotFoundError")
    assert "    why" in capsys.readouterr().out


@pytest.mark.full
def test_a_part_out_of_time_ends_with_all_that_it_started(check, tmp_path):
    code = f"""
        import fcntl, os, time
        if os.fork():
            os.wait()
        else:
            fcntl.flock(lock := open({str(tmp_path / "lock")!r}, "w"), fcntl.LOCK_EX)
            print("started", flush=True)
            time.sleep(600)
            open({str(tmp_path / "alive")!r}, "w")
    """
    assert not check.part("sleeps", 20.0, python(check, textwrap.dedent(code)))
    assert (check.parts["sleeps"]["status"], check.parts["sleeps"]["last_lines"]) == (TIMED_OUT, ["started"])
    with (tmp_path / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until what held it has ended
    assert not (tmp_path / "alive").exists()


def test_no_part_starts_without_time(tmp_path):
    check = Check(tmp_path / "gpu-check.json", FACTS, 0.5, "the test")
    assert not check.part("late", 600.0, lambda limit: pytest.fail("it ran"))
    assert report_of(check)["parts"]["late"] == {"status": NOT_STARTED, "reason": "no time is left", "seconds": 0.0}


@pytest.mark.parametrize(("changed", "kept"), [({}, True), ({"gpu": "another"}, False), ({"changed": " M a"}, False)])
def test_a_later_run_keeps_parts_of_the_same_sources_and_gpu(check, changed, kept):
    check.part("done", 600.0, lambda limit: {"status": OK})
    later = Check(check.file, {**FACTS, **changed}, 60.0, "the test")
    assert ("done" in later.parts) == kept


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_parts_without_a_gpu_fail(tmp_path, monkeypatch):
    one = suite.Entry("tail", ("--device", "cuda", "--model", "digits"))
    monkeypatch.setattr(suite, "entries", lambda device: [one])
    check = Check(tmp_path / "gpu-check.json", FACTS, 600.0, "the test")
    check.bench(["bench"])
    check.exercise()
    bench, exercised = check.parts["bench-tail-cuda-digits-O2-FusedAdam"], check.parts["exercise"]
    assert (bench["status"], bench["figures"], exercised["status"]) == (FAILED, {}, FAILED)
    assert bench["command"].startswith("python benchmarks/tail.py --device cuda")


# --- tests ------------------------------------------------------------------------------------------------------------

CASES = """
    import ctypes, pytest

    pytestmark = pytest.mark.cuda
    def test_a(): pass
    def test_fails(): assert False
    def test_crashes(): ctypes.string_at(0)
    def test_b(): pass
    @pytest.mark.parametrize("words", ["one two"])
    def test_c(words): pytest.skip("not here")
"""


@pytest.fixture
def cases(check, tmp_path):
    def write(text):
        folder = tmp_path / "tests"
        folder.mkdir()
        (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = cuda\n")
        (folder / "test_x.py").write_text(textwrap.dedent(text))
        return check.pytest("tests", 600.0)

    return write


def test_a_crash_costs_its_own_test_alone(cases):
    found = cases(CASES)
    assert found["status"] == FAILED
    assert found["counts"] == {"crashed": 1, "failed": 1, "passed": 2, "skipped": 1}
    assert found["failing"] == ["tests/test_x.py::test_fails", "tests/test_x.py::test_crashes"]


def test_tests_after_a_lost_context_run_again(cases):
    lost = """
        import pytest

        lost = False
        pytestmark = pytest.mark.cuda
        def test_loses():
            global lost
            lost = True
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        def test_is_fine(): assert not lost
    """
    assert cases(lost)["failing"] == ["tests/test_x.py::test_loses"]


@pytest.mark.full
def test_a_test_out_of_time_is_named(check, cases, monkeypatch):
    code = (
        "import pytest, time\n\n@pytest.mark.cuda\ndef test_a(): pass\n@pytest.mark.cuda\ndef test_b(): time.sleep(99)"
    )
    pytest_of = check.pytest
    monkeypatch.setattr(check, "pytest", lambda folder, limit: pytest_of(folder, 30.0))
    found = cases(code)
    assert (found["status"], found["counts"]) == (TIMED_OUT, {"passed": 1, "timed out": 1})


@pytest.mark.full(but=1)
@pytest.mark.parametrize(
    ("code", "status"), [("def test_a(): pass", OK), ("import no_such_module", FAILED), ("", FAILED)]
)
def test_tests_succeed_if_all_do(cases, code, status):
    assert cases(f"import pytest\npytestmark = pytest.mark.cuda\n{code}")["status"] == status


def test_each_test_of_a_gpu_is_in_a_folder_that_runs():
    tests = Path(__file__).parents[1]
    marked = {path for path in tests.rglob("*.py") if "mark.cuda" in path.read_text() and path != Path(__file__)}
    assert {path.relative_to(tests).parts[0] for path in marked} == set(gpu_check.FOLDERS)


# --- the exercise -----------------------------------------------------------------------------------------------------


@pytest.mark.full(but=1)
@pytest.mark.parametrize(("dtype", "checks"), [*zip(exercise.DTYPES[::-1], (2598, 2152, 1694), strict=True)], ids=str)
def test_the_exercise_runs_on_the_cpu(dtype, checks, monkeypatch, capsys):
    monkeypatch.setattr(exercise, "DTYPES", (dtype,))
    exercise.main(["--device", "cpu", "--tensors", "7"])
    assert f"exercise: 7 tensors on cpu: {checks} checks" in capsys.readouterr().out


@pytest.mark.parametrize("count", [2, 7, 64, 2500])
def test_lists_have_edges_and_guards(count):
    sizes = exercise.sizes(count, 0)
    layout = exercise.Layout(sizes, torch.device("cpu"))
    values = torch.randn(layout.elements)
    for odd in (False, True):
        made = layout.make(values, odd)
        assert [t.numel() for t in made.tensors] == sizes
        assert torch.equal(made.flat(), values)
        assert {t.storage_offset() % 16 for t in made.tensors} == {pair[odd] for pair in exercise.OFFSETS[:count]}
        assert made.is_intact()
    if count >= 64:
        first = next(t for t in made.tensors if t.numel())
        first.as_strided((1,), (1,), first.storage_offset() - 1).fill_(1.0)
        assert not made.is_intact()


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


@pytest.mark.full(but=3)
@pytest.mark.parametrize(
    ("module", "name", "fault", "told"),
    [
        (ops, "multi_tensor_scale", _beyond, "memory around list"),
        (ops, "multi_tensor_scale", _unflagged, "inf at 0 is flagged"),
        *((optimizer_ops, n, _stale, f"{n}, ") for n in ("adam", "sgd", "adagrad", "lion", "muon")),
        (optimizer_ops, "lamb", _stale, "nvlamb, split"),
    ],
)
def test_the_exercise_notices_a_fault(monkeypatch, module, name, fault, told):
    monkeypatch.setattr(module, name, fault(getattr(module, name)))
    exercised = exercise.Exercise(exercise.sizes(100, 0), torch.bfloat16, torch.device("cpu"), exercise.Checks())
    with pytest.raises(AssertionError, match="checks failed") as raised:
        exercised.run()
    assert told in str(raised.value)
