"""Words: a docstring begins with a verb or a noun, and a name means one thing."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = sorted([*(ROOT / "ampctx").rglob("*.py"), *(ROOT / "ampctx-apex" / "ampctx_apex").rglob("*.py")])
TREES = {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in PRODUCT}
# They begin relative clauses, whose subject a reader has to guess.
NO_SUBJECT = {"As", "Of", "That", "Those", "What", "Where", "Which", "Whose"}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@pytest.mark.parametrize("file", TREES)
def test_a_docstring_begins_with_a_verb_or_a_noun(file):
    nodes = [node for node in ast.walk(TREES[file]) if isinstance(node, DOCUMENTED)]
    first = [re.match(r"\w*", ast.get_docstring(node) or "")[0] for node in nodes]
    assert {getattr(n, "name", "module") for n, word in zip(nodes, first, strict=True) if word in NO_SUBJECT} == set()


# "given" is an argument of steps, a place holds pending gradients, a plan repeats calls, a message is explained.
@pytest.mark.parametrize(
    ("name", "files"), [("explain", ["ampctx/__main__.py"]), ("plan", []), ("given", []), ("place", [])]
)
def test_no_other_function_has_that_name(name, files):
    functions = {f: [n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)] for f, tree in TREES.items()}
    assert [file for file, names in functions.items() if name in names] == files
