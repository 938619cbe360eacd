"""``ampctx-apex migrate`` changes names of whole programs, and no result. test_migrate_names.py has all imports."""

import runpy
import sys

import pytest
from migrating import migrated
from processes import ROOT

from ampctx import amp

pytest.importorskip("libcst")

# Arguments with which a program in tests/apex/programs uses apex, and the lines that change.
PROGRAMS = {
    "full_names": ("--fp16", 4),
    "fused_optimizer": ("--fp16", 1),
    "gan": ("--overflow", 1),
    "imports_in_methods": ("", 3),
}


@pytest.mark.full(but=2)
@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_print_the_same_before_and_after(tmp_path, monkeypatch, capsys, program):
    before = (ROOT / "tests" / "apex" / "programs" / f"{program}.py").read_text()
    after, findings = migrated(tmp_path, before)
    arguments, count = PROGRAMS[program]
    changed = [new for old, new in zip(before.splitlines(), after.splitlines(), strict=True) if old != new]
    assert (len(changed), "manual" in {f.status for f in findings}) == (count, False), changed
    monkeypatch.setattr(sys, "argv", [program, *arguments.split()])
    printed = []
    for text in (before, after):
        (tmp_path / "program.py").write_text(text)
        runpy.run_path(str(tmp_path / "program.py"), run_name="__main__")
        amp.reset()
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert len(set(printed[0].splitlines())) > 3
