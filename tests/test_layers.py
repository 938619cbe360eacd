"""Imports go down the layers of docs/design.md only, and csrc includes follow the same idea."""

import ast
import graphlib
import re
from collections import namedtuple
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Each imports from its own room and from those above it in this list.
ROOMS = {
    "what every room uses": r"ampctx\._[a-z]\w*",
    "kernels": r"ampctx\.kernels(\.\w+)?",
    "public names of kernels": r"ampctx\.(ops|optimizer_ops|foreach)",
    "casts": r"ampctx\.casts(\.\w+)?",
    "weights": r"ampctx\.weights(\.\w+)?",
    "scaling": r"ampctx\.scaling(\.\w+)?",
    "optimizers": r"ampctx\.optimizers(\.\w+)?",
    "amp": r"ampctx\.amp(\.\w+)?",
    "for several ranks": r"ampctx\.distributed",
    "the package": r"ampctx",
    "what ampctx-apex may use": r"ampctx\.spi",
    "the command": r"ampctx\.__main__",
    "for frameworks": r"ampctx\.frameworks(\.\w+)?",
    "ampctx-apex": r"ampctx_apex(\.\w+)*",
}
# What ampctx-apex imports of ampctx: the public API, and spi.
PUBLIC = re.compile(r"ampctx(\.(amp|distributed|foreach|ops|optimizer_ops|optimizers|spi))?")


def rooms_of(name: str) -> list[int]:
    return [
        i for i, names in enumerate(ROOMS.values()) if re.fullmatch(names, name) and (i or name != "ampctx.__main__")
    ]


def module_name(path: Path, top: Path) -> str:
    parts = path.relative_to(top).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    module_name(path, top): path
    for top, package in ((ROOT, "ampctx"), (ROOT / "ampctx-apex", "ampctx_apex"))
    for path in sorted((top / package).rglob("*.py"))
}
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}
SERVED = "ampctx_apex.modules"


def in_our_words(name: str) -> str:
    """The file's own name for a module that goes by one of apex's."""
    return f"{SERVED}.{name}" if f"{SERVED}.{name}" in MODULES else name


def source(name: str, node: ast.ImportFrom) -> str:
    """The module that ``node`` in the module ``name`` imports from."""
    if not node.level:
        return in_our_words(node.module or "")
    package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
    above = package.split(".")[: len(package.split(".")) + 1 - node.level]
    return ".".join([*above, *([node.module] if node.module else [])])


def imported(name: str, tree: ast.AST) -> set[str]:
    """Our modules that a module imports, sub-modules by their own name: in functions and for type checkers, too.

    A module that is named as a string, for ``sys.modules`` or ``import_module``, counts as imported.
    """
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(in_our_words(a.name) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = source(name, node)
            names.update(sub if (sub := f"{module}.{a.name}") in MODULES else module for a in node.names)
        elif isinstance(node, (ast.Subscript, ast.Call)):
            inside = node.slice if isinstance(node, ast.Subscript) else (node.args or [None])[0]
            owner = ast.unparse(node.value if isinstance(node, ast.Subscript) else node.func)
            if re.search(r"sys\.modules|import_module", owner) and isinstance(inside, ast.Constant):
                names.add(inside.value)
    return {n for n in names if n in MODULES}


GRAPH = {name: imported(name, TREES[name]) for name in MODULES}


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_point_down(name):
    assert len(rooms_of(name)) == 1, f"give {name} a room"
    for other in GRAPH[name]:
        assert rooms_of(other) <= rooms_of(name), f"{name} imports {other}"


def test_no_module_imports_itself_in_the_end():
    graph = {name: others - {name} for name, others in GRAPH.items()}
    list(graphlib.TopologicalSorter(graph).static_order())  # CycleError names the modules


def test_the_table_of_files_is_the_tree():
    """docs/find.md names each module in the row of its room, and nothing else."""
    table = (ROOT / "docs" / "find.md").read_text().split("## Files")[1]
    rows = re.findall(r"^\| `?(\w+)`? \| (.+) \|$", table, re.M)
    tops = {"ampctx", "shared"}
    named = {(room if room not in tops else "", name) for room, files in rows for name in re.findall(r"`(\w+)`", files)}
    parts = [path.relative_to(ROOT / "ampctx").parts for path in (ROOT / "ampctx").rglob("*.py")]
    assert named == {(*[""] * (2 - len(p)), *p[:-1], p[-1][:-3])[-2:] for p in parts if p[-1] != "__init__.py"}


@pytest.mark.parametrize("page", ["design", "find"])
def test_files_that_a_page_names_exist(page):
    named = set(re.findall(r"`([\w.]+/[\w./]*)`", (ROOT / "docs" / f"{page}.md").read_text()))
    assert len(named) > 5
    assert [name for name in named if not (ROOT / name).exists() and not (ROOT / "ampctx" / name).exists()] == []


@pytest.mark.parametrize(
    "text",
    [
        "from ampctx.amp import session",
        "if TYPE_CHECKING:\n    from ampctx.amp.session import AmpSession",
        "def later():\n    import ampctx.amp.session",
        "sys.modules['ampctx.amp.session'].AmpSession",
        "sys.modules.get('ampctx.amp.session')",
        "importlib.import_module('ampctx.amp.session')",
    ],
)
def test_every_way_to_import_is_seen(text):
    assert imported("ampctx._errors", ast.parse(text)) == {"ampctx.amp.session"}


def test_imports_by_apex_names_are_seen():
    assert f"{SERVED}.apex.optimizers" in GRAPH[f"{SERVED}.apex"]
    assert source("ampctx_apex", ast.ImportFrom("apex.amp", [], 0)) == f"{SERVED}.apex.amp"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name not in dir(namedtuple("Any", []))


def private_names(tree: ast.AST) -> set[str]:
    """What a module calls by a private name of its own: functions, classes, attributes, variables."""
    made = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Store):
            made.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return {name for name in made if is_private(name)}


APEX = sorted(name for name in MODULES if re.fullmatch(ROOMS["ampctx-apex"], name))
OF_THE_CORE = set().union(*(private_names(TREES[name]) for name in MODULES if name not in APEX))


@pytest.mark.parametrize("name", APEX)
def test_ampctx_apex_uses_the_public_api_and_spi_alone(name):
    """It touches no private attribute of what these give, either."""
    for other in GRAPH[name] - set(APEX):
        assert PUBLIC.fullmatch(other), f"{name} imports {other}: let ampctx.spi offer it"
    own = private_names(TREES[name])
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.ImportFrom) and source(name, node) not in APEX:
            private = [a.name for a in node.names if is_private(a.name) and source(name, node).startswith("ampctx")]
            assert not private, f"{name}:{node.lineno} imports {private}"
        if isinstance(node, ast.Attribute) and node.attr in OF_THE_CORE - own:
            assert ast.unparse(node.value) in ("self", "cls"), f"{name}:{node.lineno} reads .{node.attr} of the core"


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("ampctx.frameworks.")])
def test_a_framework_gets_the_public_api_alone(name):
    assert GRAPH[name] <= {"ampctx", "ampctx.amp", "ampctx.frameworks.accelerate"}


def test_spi_offers_what_ampctx_apex_uses_and_no_more():
    used = set()
    for node in (node for name in APEX for node in ast.walk(TREES[name])):
        if isinstance(node, ast.ImportFrom) and node.module == "ampctx.spi":
            used.update(alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "spi":
            used.add(node.attr)
    tree = TREES["ampctx.spi"]
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    imported = {a.asname or a.name for node in tree.body if isinstance(node, ast.ImportFrom) for a in node.names}
    assert used <= imported | defined | {"session"}
    assert defined <= used >= imported - names - {"annotations"}


def test_kernels_know_nothing_of_torch():
    kernels = [p for d in ("functors", "cpu", "cuda") for p in (ROOT / "csrc" / d).iterdir()]
    assert len(kernels) > 10
    for path in kernels:
        for include in re.findall(r'#include [<"]([^>"]+)', path.read_text()):
            assert "torch" not in include, f"{path.name} includes {include}"


def test_functors_include_functors_alone():
    for path in (ROOT / "csrc" / "functors").iterdir():
        for include in re.findall(r'#include "([^"]+)"', path.read_text()):
            assert include.startswith("functors/") or "/" not in include, f"{path.name} includes {include}"


def test_no_private_torch_names_outside_the_guarded_ones():
    """Every torch._x in the package stands on a line, or below a comment, that says why."""
    for path in MODULES.values():
        lines = path.read_text().splitlines()
        for i, line in enumerate(lines):
            if re.search(r"\btorch\._[a-zA-Z]", line.split("#")[0]):
                above = "\n".join(lines[max(0, i - 4) : i + 1])
                assert "private" in above.lower(), f"{path.name}:{i + 1} uses a private name of torch without a reason"
