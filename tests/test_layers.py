"""Imports go down the layers of docs/design.md only, and csrc includes follow the same idea."""

import ast
import graphlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Each imports from its own room and from those above it in this list.
ROOMS = {
    "what every room uses": r"ampctx\.(_[a-z]\w*|distributed)",
    "kernels": r"ampctx\.kernels(\.\w+)?",
    "public names of kernels": r"ampctx\.(ops|optimizer_ops|foreach|multi_tensor_apply)",
    "casts": r"ampctx\.casts(\.\w+)?",
    "masters": r"ampctx\.masters(\.\w+)?",
    "scaling": r"ampctx\.scaling(\.\w+)?",
    "optimizers": r"ampctx\.optimizers(\.\w+)?",
    "amp": r"ampctx\.amp(\.\w+)?",
    "the package": r"ampctx",
    "compat": r"ampctx\.compat(\.\w+)*",
    "migrate": r"ampctx\.migrate(\.\w+)*",
    "the command": r"ampctx\.__main__",
}


def rooms_of(name: str) -> list[int]:
    return [
        i for i, names in enumerate(ROOMS.values()) if re.fullmatch(names, name) and (i or name != "ampctx.__main__")
    ]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(p): p for p in sorted((ROOT / "ampctx").rglob("*.py"))}


def imported(path: Path) -> set[str]:
    """The ampctx modules that a file imports, sub-modules by their own name."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update(sub if (sub := f"{node.module}.{a.name}") in MODULES else node.module for a in node.names)
    return {n for n in names if n in MODULES}


GRAPH = {name: imported(path) for name, path in MODULES.items()}


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_point_down(name):
    assert len(rooms_of(name)) == 1, f"give {name} a room"
    for other in GRAPH[name]:
        assert rooms_of(other) <= rooms_of(name), f"{name} imports {other}"


def test_no_module_imports_itself_in_the_end():
    graph = {name: others - {name} for name, others in GRAPH.items() if not name.startswith("ampctx.compat.")}
    list(graphlib.TopologicalSorter(graph).static_order())  # CycleError names the modules


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
