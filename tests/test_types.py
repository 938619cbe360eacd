"""mypy passes the programs of README and docs as they are, and ``public_types.py`` with what ``--strict`` asks for."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from page_programs import programs

ROOT = Path(__file__).resolve().parent.parent
PAGES = {page.stem: page.read_text() for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]}
PUBLIC = ROOT / "tests" / "public_types.py"
CONFIG = f"""
[mypy]
mypy_path = {ROOT}:{ROOT / "ampctx-apex"}
ignore_missing_imports = True
scripts_are_modules = True

[mypy-ampctx.*,ampctx_apex.*]
implicit_reexport = False
follow_imports = silent

[mypy-public_types]
check_untyped_defs = True
disallow_any_generics = True
disallow_incomplete_defs = True
disallow_subclassing_any = True
disallow_untyped_calls = True
disallow_untyped_decorators = True
disallow_untyped_defs = True
extra_checks = True
strict_equality = True
warn_return_any = True
warn_unused_ignores = True
"""
# The types of torch allow less than its docs do, and a name of a later line has no type yet.
NOT_OURS = (
    'to "init_process_group"',
    '"FSDPModule"',
    '"AsyncSaveResponse" of',
    '"Tensor | None" is not',
    'of "factor"',
)


@pytest.mark.full  # `make lint` runs it
def test_programs_pass_mypy(tmp_path):
    pytest.importorskip("mypy")
    for name, page in PAGES.items():
        shown = re.findall(r"```python\n(.*?)```", page, flags=re.S)
        changed = [code for code, _ in programs(page)] if name in ("tutorial", "fsdp_zero") else []
        for i, code in enumerate([*shown, *changed]):
            (tmp_path / f"{name}_{i}.py").write_text(code)
    (tmp_path / PUBLIC.name).write_text(PUBLIC.read_text())
    (tmp_path / "mypy.ini").write_text(CONFIG)
    files = sorted(tmp_path.glob("*.py"))
    assert len(files) > 40
    command = [sys.executable, "-m", "mypy", "--config-file", tmp_path / "mypy.ini", "--no-error-summary", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = (done.stdout + done.stderr).splitlines()
    assert [line for line in lines if not any(words in line for words in NOT_OURS)] == []
    assert all(any(words in line for line in lines) for words in NOT_OURS)


def test_the_program_of_public_names_runs():
    runpy.run_path(str(PUBLIC), run_name="__main__")
