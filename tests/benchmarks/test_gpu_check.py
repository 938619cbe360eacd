"""gpu-check without a GPU: its report, whatever goes wrong; the exercise of the kernels on those of the CPU."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import gpu_check
import pytest
import torch
from gpu_check import FAILED, OK, RUNNING, Check

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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_gpu_the_report_says_so(tmp_path, capsys):
    before = sorted((gpu_check.ROOT / "benchmarks" / "results").iterdir())
    assert gpu_check.main(["--out", str(tmp_path / "found.json")]) == 3
    assert capsys.readouterr().out.endswith(f"nothing has run: torch {torch.__version__} finds no CUDA device\n")
    report = json.loads((tmp_path / "found.json").read_text())
    assert (report["facts"]["torch"], report["facts"]["gpu"], report["parts"]) == (torch.__version__, None, {})
    assert sorted((gpu_check.ROOT / "benchmarks" / "results").iterdir()) == before


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


def test_what_is_worth_most_runs_before_the_tests():
    before, after = gpu_check.benches()
    scripts = [entry.script for entry in before]
    assert [*dict.fromkeys(scripts)] == [*gpu_check.WORTH[:5]]
    assert (scripts.count("tail"), {entry.script for entry in after}) == (12, {"tail", "ops"})


CASES = """
    import ctypes, pytest

    pytestmark = pytest.mark.cuda
    def test_fails(): assert False
    @pytest.mark.parametrize("words", ["one two"])
    def test_skips(words): pytest.skip("not here")
    def test_crashes(): ctypes.string_at(0)
    def test_b(): pass
"""


def test_a_crash_costs_its_own_test_alone(check, tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = cuda\n")
    (tmp_path / "tests" / "test_x.py").write_text(textwrap.dedent(CASES))
    found = check.pytest("tests", 600.0)
    assert (found["status"], found["counts"]) == (FAILED, {"crashed": 1, "failed": 1, "passed": 1, "skipped": 1})
    assert found["failing"] == ["tests/test_x.py::test_fails", "tests/test_x.py::test_crashes"]


def test_each_test_of_a_gpu_is_in_a_folder_that_runs():
    tests = Path(__file__).parents[1]
    marked = {path for path in tests.rglob("*.py") if "mark.cuda" in path.read_text() and path != Path(__file__)}
    assert {path.relative_to(tests).parts[0] for path in marked} == set(gpu_check.FOLDERS)


@pytest.mark.full(but=1)
@pytest.mark.parametrize(("dtype", "checks"), [*zip(exercise.DTYPES[::-1], (2598, 2152, 1694), strict=True)], ids=str)
def test_the_exercise_runs_on_the_cpu(dtype, checks, monkeypatch, capsys):
    monkeypatch.setattr(exercise, "DTYPES", (dtype,))
    exercise.main(["--device", "cpu", "--tensors", "7"])
    assert f"exercise: 7 tensors on cpu: {checks} checks" in capsys.readouterr().out


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
