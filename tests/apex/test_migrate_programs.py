"""``ampctx migrate --to torch`` on whole programs, in the forms in which apex was used: all are rewritten, and the
results train as before, with the same steps skipped."""

import json
import math
import re

import pytest
from migrating import ROOT, migrated, run

pytest.importorskip("libcst")

PROGRAMS = sorted((ROOT / "tests" / "migrate" / "programs").glob("*.py"))
# The arguments of each run; one without any if a program is not named.
RUNS = {
    "accumulates_and_clips_each_time": ["--fp16", ""],
    "accumulates_and_clips_once": ["--fp16", "", "--fp16 --fp16_opt_level O0"],
    "branches": ["--amp", "--amp --free", "--amp --accumulate", "--amp --accumulate --free", "--accumulate", ""],
    "epochs_in_functions": ["", "--loss-scale 128.0", "--opt-level O0"],
    "flags_and_averages": ["--amp", ""],
    "fused_optimizer": ["--fp16", "", "--fp16 --test"],
    "gan": ["", "--fp32", "--overflow"],
    "full_names": ["--fp16", ""],
    "nested_update": ["--fp16", ""],
    "overflows": ["--amp", ""],
    "steps_together": ["--fp16", ""],
    "trainer_and_optimizer": ["--fp16", ""],
    "trainer_given_optimizer": ["--fp16", ""],
}
RUNNER = """
import contextlib, io, json, sys
{setup}
printed = {{}}
for name, source, arguments in json.load(open(sys.argv[1])):
    sys.argv[1:] = arguments.split()
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(source, name, "exec"), {{"__name__": "__main__"}})
    {undo}
    printed[name + " " + arguments] = out.getvalue()
print(json.dumps(printed))
"""
BEFORE = {"setup": "import ampctx_apex.apex; from ampctx import amp", "undo": "amp.reset()"}
AFTER = {"setup": "sys.modules['apex'] = sys.modules['ampctx'] = None", "undo": "pass"}


def torch_of(tmp_path, program):
    result = migrated(tmp_path, program.read_text(), "torch")
    assert {f.status for f in result.findings} == {"adapted"}, result.findings
    return result.after


@pytest.mark.full(but=5)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.stem)
def test_programs_are_rewritten(tmp_path, program):
    after = torch_of(tmp_path, program)
    assert not re.search(r"\b(import|from) apex\b|\bapex\.|\bamp\.(?!GradScaler)", after)
    assert after.count("torch.amp.GradScaler(") == 1
    assert after.count(".step(") == program.read_text().count(".step(")


def test_the_arguments_are_of_programs_that_are_there():
    assert set(RUNS) < {p.stem for p in PROGRAMS}


def numbers(text):
    """The numbers that a program prints, without apex's banner."""
    lines = [line for line in text.splitlines() if not re.search(r" : |^(Selected|Defaults|Processing|After) ", line)]
    return [float(n) for n in re.findall(r"(?<![\w.])-?\d+\.\d+(?:e-?\d+)?", "\n".join(lines))]


@pytest.mark.full
def test_programs_print_the_same_before_and_after(tmp_path):
    printed = []
    for texts, form in [
        ({p.stem: p.read_text() for p in PROGRAMS}, BEFORE),
        ({p.stem: torch_of(tmp_path, p) for p in PROGRAMS}, AFTER),
    ]:
        path = tmp_path / "runs.json"
        path.write_text(json.dumps([(n, t, a) for n, t in texts.items() for a in RUNS.get(n, [""])]))
        result = run("-c", RUNNER.format(**form), path)
        assert result.returncode == 0, result.stderr
        printed.append(json.loads(result.stdout))
    before, after = printed
    for name in before:
        old, new = numbers(before[name]), numbers(after[name])
        assert len(old) == len(new) >= 10, (name, before[name], after[name])
        assert len(set(old)) > 8, name
        # Losses, and 0 or 1 for skipped steps. The model's layers are cast alike; what else is may round otherwise.
        for a, b in zip(old, new, strict=True):
            assert math.isclose(a, b, rel_tol=1e-3), (name, old, new)
    skipped = numbers(before["overflows --amp"])[1::2]
    assert 0 < sum(skipped) < len(skipped)
    assert sum(numbers(before["overflows "])[1::2]) == len(skipped)
    # The discriminator's third step.
    assert [numbers(before["gan --overflow"])[i::5] for i in (3, 4)] == [[0, 0, 1, 0, 0, 0], [0] * 6]


@pytest.mark.full
def test_levels_that_torch_lacks_are_refused_at_run_time(tmp_path):
    program = next(p for p in PROGRAMS if p.stem == "epochs_in_functions")
    path = tmp_path / "program.py"
    path.write_text(torch_of(tmp_path, program))
    result = run(path, "--opt-level", "O2")
    assert result.returncode == 1
    assert "ValueError: torch.amp has no opt_level O2" in result.stderr
