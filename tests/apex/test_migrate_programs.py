"""Programs in the forms in which apex was imported: ``ampctx-apex migrate`` changes names, and no result."""

import runpy
import sys

import pytest
from migrating import ROOT, migrated

from ampctx import amp

pytest.importorskip("libcst")

PROGRAMS = sorted((ROOT / "tests" / "apex" / "programs").glob("*.py"))
# Arguments with which a program uses apex, and the lines that change.
RUNS = {
    "accumulates_and_clips_each_time": ("--fp16", 1),
    "branches": ("--amp --accumulate", 1),
    "epochs_in_functions": ("--loss-scale 128.0", 1),
    "flags_and_averages": ("--amp", 1),
    "full_names": ("--fp16", 4),
    "fused_optimizer": ("--fp16", 1),
    "gan": ("--overflow", 1),
    "imports_in_methods": ("", 3),
    "models_in_a_list": ("", 1),
}


def test_all_programs_are_run():
    assert [p.stem for p in PROGRAMS] == sorted(RUNS)


@pytest.mark.full(but=2)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.stem)
def test_programs_print_the_same_before_and_after(tmp_path, monkeypatch, capsys, program):
    before = program.read_text()
    after, findings = migrated(tmp_path, before)
    arguments, count = RUNS[program.stem]
    changed = [new for old, new in zip(before.splitlines(), after.splitlines(), strict=True) if old != new]
    assert (len(changed), "manual" in {f.status for f in findings}) == (count, False), changed
    monkeypatch.setattr(sys, "argv", [program.name, *arguments.split()])
    printed = []
    for text in (before, after):
        (tmp_path / "program.py").write_text(text)
        runpy.run_path(str(tmp_path / "program.py"), run_name="__main__")
        amp.reset()
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert len(set(printed[0].splitlines())) > 3
