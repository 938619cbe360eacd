"""Imports go down the layers of docs/design.md only, and csrc includes follow the same idea."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

LAYERS = [
    ["ampctx._graph_break"],
    [
        "ampctx._errors",
        "ampctx._cuda_support",
        "ampctx._each",
        "ampctx._grad_mode",
        "ampctx._compiling",
        "ampctx.amp.cast_lists",
    ],
    [
        "ampctx._extension",
        "ampctx._reference",
        "ampctx.amp.opt_level",
        "ampctx.amp.cast_arguments",
        "ampctx.amp.replaced_methods",
        "ampctx.distributed",
        "ampctx._sharding",
    ],
    ["ampctx._reference_optimizers", "ampctx._grouping", "ampctx.amp.cpu_casts"],
    ["ampctx.ops"],
    ["ampctx.foreach", "ampctx.optimizer_ops"],
    ["ampctx._calling_form", "ampctx.amp.threads", "ampctx.model_grads", "ampctx.optimizers._options"],
    ["ampctx.optimizers._scaling"],
    ["ampctx.optimizers._work", "ampctx.amp.model_watch"],
    ["ampctx.optimizers._checkpoint", "ampctx.optimizers._plan"],
    [
        "ampctx.amp.fused_layouts",
        "ampctx.amp.loss_scale",
        "ampctx.amp.master_params",
        "ampctx.amp.casting",
        "ampctx.amp.autocast",
        "ampctx.amp.explain",
        "ampctx.amp.function_casts",
        "ampctx.amp.fp32_ops",
        "ampctx.grad_clip",
        "ampctx.multi_tensor_apply",
    ],
    [
        "ampctx.amp.scaler_state",
        "ampctx.amp.step_outcome",
        "ampctx.amp.device_skips",
        "ampctx.amp.kept_modules",
    ],
    ["ampctx.amp.stall", "ampctx.amp.step_history"],
    [
        "ampctx.amp.grad_scaler",
        "ampctx.amp.block_gradients",
        "ampctx.amp.step_undo",
        "ampctx.optimizers._base",
    ],
    [
        "ampctx.amp.step_hook",
        "ampctx.optimizers.fused_adam",
        "ampctx.optimizers.fused_sgd",
        "ampctx.optimizers.fused_adagrad",
        "ampctx.optimizers.fused_lamb",
        "ampctx.optimizers.fused_novograd",
        "ampctx.optimizers.larc",
    ],
    ["ampctx.optimizers", "ampctx.amp.run_state", "ampctx.amp.master_weights"],
    ["ampctx.amp.session"],
    ["ampctx.amp"],
    ["ampctx"],
    ["ampctx.__main__"],
]
LEVEL = {name: i for i, names in enumerate(LAYERS) for name in names}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(p): p for p in sorted((ROOT / "ampctx").rglob("*.py"))}
# May import anything, and each other; only the command imports them.
COMPAT = {name for name in MODULES if re.match(r"ampctx\.compat\b", name)}


def imported(path: Path) -> set[str]:
    """The ampctx modules that a file imports, sub-modules by their own name."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update(sub if (sub := f"{node.module}.{a.name}") in MODULES else node.module for a in node.names)
    return {n for n in names if n in MODULES}


@pytest.mark.parametrize("name", sorted(MODULES.keys() - COMPAT))
def test_imports_point_down(name):
    assert name in LEVEL, f"give {name} a place in the layers"
    for other in imported(MODULES[name]):
        if other in COMPAT:
            assert name == "ampctx.__main__", f"{name} imports {other}"
        else:
            assert LEVEL[other] < LEVEL[name], f"{name} imports {other}"


def test_compat_does_not_import_the_command():
    assert COMPAT
    for name in COMPAT:
        assert "ampctx.__main__" not in imported(MODULES[name]), name


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
