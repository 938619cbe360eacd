"""The rules that keep the project small. tests/budgets.toml has the numbers, docs/contributing.md the reasons."""

import ast
import itertools
import os
import re
import subprocess
import sys
import tokenize
from collections import defaultdict
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
BUDGETS = tomllib.loads((ROOT / "tests" / "budgets.toml").read_text())
# The one file that a program writes and git keeps.
GENERATED = "ampctx/kernels/steps.py"
SKIPPED = {"__pycache__", "build", "_ops.so"}


def files(folder, *endings):
    """The sources below a folder, without what builds leave there."""
    found = sorted(p for p in (ROOT / folder).rglob("*") if p.suffix in endings and p.is_file())
    inside = [p for p in found if not SKIPPED & set(p.relative_to(ROOT).parts)]
    return [p for p in inside if str(p.relative_to(ROOT)) != GENERATED]


PRODUCT = [*files("ampctx", ".py"), *files("ampctx-apex", ".py")]
TESTS = files("tests", ".py")


def name_of(path):
    return str(path.relative_to(ROOT))


def lines(paths):
    return sum(path.read_bytes().count(b"\n") for path in paths)


BLANK = (tokenize.NL, tokenize.NEWLINE, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def lines_of_code(path):
    """The lines of a file without blank lines, comments and docstrings."""
    code = set()
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type not in (*BLANK, tokenize.ENCODING):
                code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            code.difference_update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(code)


# --- 1, 8: lines ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", BUDGETS["code"])
def test_a_package_keeps_its_budget(room):
    now = sum(map(lines_of_code, [*files(room, ".py"), *([ROOT / GENERATED] if room == "ampctx" else [])]))
    assert now <= BUDGETS["code"][room]["now"], f"{room} has {now} lines of code: take out what the change replaces"


@pytest.mark.parametrize("room", BUDGETS["lines"])
def test_a_folder_keeps_its_budget(room):
    now = lines(files(room, ".py", ".h", ".cpp", ".cu", ".cuh", ".toml"))
    assert now <= BUDGETS["lines"][room]["now"], f"{room} has {now} lines: take out what the change replaces"


def rows(table, above=()):
    """The rows {now, goal} of a table of budgets, by the names above them."""
    if "now" in table:
        return {above: (table["now"], table["goal"])}
    return {k: row for name, inner in table.items() for k, row in rows(inner, (*above, name)).items()}


def test_no_commit_raises_a_budget_above_its_goal():
    """Whoever needs it. Compares the file with those of the latest commit and the one before."""
    versions = [rows(BUDGETS)]
    for commit in ("HEAD", "HEAD~1"):
        done = subprocess.run(["git", "show", f"{commit}:tests/budgets.toml"], cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            break  # no checkout, or one without history
        try:
            versions.append(rows(tomllib.loads(done.stdout)))
        except (TypeError, AttributeError):
            break  # from before goals
    for new, old in itertools.pairwise(versions):
        for name in new.keys() & old.keys():
            now, goal = new[name]
            assert now <= max(old[name][0], goal), f"{name} goes from {old[name][0]} to {now}: its goal is {goal}"
            assert goal <= old[name][1], f"the goal of {name} goes from {old[name][1]} to {goal}"


@pytest.mark.parametrize("name", ["train", "Net", "LEVELS", "OPTIMIZERS"])
def test_the_kit_of_tests_has_the_one_definition(name):
    """Old programs, which migrate moves, have their own."""
    pattern = re.compile(rf"^(def|class) {name}\b|^{name}\b.* = ", re.M)
    found = [name_of(p) for p in TESTS if "programs" not in p.parts and pattern.search(p.read_text())]
    assert found in ([], ["tests/kit.py"])


# --- 2: one name, one thing -------------------------------------------------------------------------------------------


def test_a_class_name_stands_for_one_thing():
    """Modules under apex's names have apex's."""
    places = defaultdict(list)
    for path in (p for p in PRODUCT if "modules" not in p.parts):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name_of(path))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


# --- 4, 6: how far a feature and a step reach -------------------------------------------------------------------------


@pytest.mark.parametrize("feature", BUDGETS["features"])
def test_a_feature_is_named_in_few_files(feature):
    pattern = re.compile(BUDGETS["features"][feature]["pattern"], re.I)
    found = [name_of(path) for path in files("ampctx", ".py") if pattern.search(path.read_text())]
    assert found, f"{pattern.pattern} is in no file"
    assert len(found) <= BUDGETS["features"][feature]["now"], found


@pytest.mark.parametrize("plain", [False, True])
def test_a_step_enters_few_functions_and_files(plain):
    """In a process of its own: what other tests have imported or set up is asked for on the way."""
    command = [sys.executable, ROOT / "benchmarks" / "walk.py"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"AMPCTX_PLAN": str(int(not plain))}
    )
    for part, most in BUDGETS["walk"]["functions"].items():
        if part.startswith("plain ") is not plain:
            continue
        name = re.escape(part.removeprefix("plain "))
        functions, in_files = map(
            int, re.search(rf"^{name}: (\d+) functions in (\d+) files", done.stdout, re.M).groups()
        )
        assert functions <= most["now"], part
        assert in_files <= BUDGETS["walk"]["files"][part]["now"], part


def test_no_file_is_too_long_to_read():
    product = [*PRODUCT, *files("csrc", ".h", ".cpp", ".cu", ".cuh")]
    assert {name_of(path): n for path in product if (n := lines([path])) > 520} == {}


# --- 7, 9, 10: what is not written ------------------------------------------------------------------------------------


def test_no_product_of_a_program_is_in_git():
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("this tree is no git checkout")
    pages = ("machine_code", "benchmarks", "apex_names", "coverage")
    made = {f"docs/{page}.md" for page in pages}
    results = {f for f in done.stdout.split() if f.startswith("benchmarks/") and f.endswith((".json", ".png"))}
    # A report of a real GPU stays as its JSON.
    assert not made & set(done.stdout.split())
    assert {f for f in results if not f.startswith("benchmarks/results/gpu-")} == set()


def test_an_entry_of_the_changelog_is_one_line():
    for line in (ROOT / "CHANGELOG.md").read_text().splitlines():
        assert not line or line.startswith(("#", "- ")), f"goes on from an entry: {line!r}"
        assert len(line) <= 160, f"too long for an entry: {line!r}"


def test_no_code_is_made_at_run_time():
    for path in (p for p in PRODUCT if re.search(r"exec\(|globals\(\)", p.read_text())):
        for node in ast.walk(ast.parse(path.read_text())):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            assert called != "globals().update", f"{name_of(path)}:{node.lineno}"
            # The launcher runs the user's program.
            assert called != "exec" or path.name == "run.py", f"{name_of(path)}:{node.lineno} calls exec"


def test_code_is_formatted():
    """``# fmt: skip`` would be for tables. No table of the products needs it."""
    assert [name_of(path) for path in PRODUCT if re.search(r"# fmt: (skip|off)", path.read_text())] == []
