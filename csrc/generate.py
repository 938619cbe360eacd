"""Writes the sources that ampctx/kernels/spec.py declares. Needs Python alone.

    python csrc/generate.py    after a change of spec.py: writes ampctx/kernels/steps.py, which is committed

The build writes the C++ side into its own folder:

options.h      a struct of numbers for each op, in the order of its schema
step_ops.h     the functors of each op, and all that have loops on the CPU;
               AMPCTX_STEP_OPS(OP, with): OP(name, Options, with) for each op, and its lists
<op>.cu        the entry point of an element-wise op on CUDA: each is a compilation of its own
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

SPEC = Path(__file__).resolve().parent.parent / "ampctx" / "kernels" / "spec.py"
STEPS = SPEC.with_name("steps.py")
_HEADER = "// Made from ampctx/kernels/spec.py by csrc/generate.py.\n#pragma once\n"


def load_spec() -> ModuleType:
    """The file without the package around it, which imports torch."""
    name = "ampctx_spec"
    spec = importlib.util.spec_from_file_location(name, SPEC)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _options(spec) -> str:
    return f"{spec.name.capitalize()}Options"


def _options_header(specs) -> str:
    parts = [_HEADER, "namespace ampctx {\n"]
    for spec in specs:
        fields = [f"  {'double' if n.type == 'float' else 'bool'} {n.name};" for n in spec.numbers]
        reads = ", ".join("in.number()" if n.type == "float" else "in.flag()" for n in spec.numbers)  # in this order
        parts += [f"struct {_options(spec)} {{", *fields, "", "  template <class Arguments>"]
        parts += [f"  static {_options(spec)} taken(Arguments& in) {{ return {{{reads}}}; }}"]
        of_row = [f"row[{spec.columns.index(n.name)}]" if n.type == "float" else n.name for n in spec.numbers]
        parts += [f"  {_options(spec)} with(const double* row) const {{ return {{{', '.join(of_row)}}}; }}"]
        parts += [f"  static constexpr int kColumns = {len(spec.columns)};", "};\n"]
    return "\n".join([*parts, "}  // namespace ampctx\n"])


def _functors(specs) -> list[str]:
    parts = ["template <class... Optimizers>", "struct Functors {};\n"]
    for spec in specs:
        if spec.elementwise:
            parts += ["template <class T>"]
            parts += [f"Functors<{', '.join(spec.functors)}> functors_of(const {_options(spec)}&);\n"]
    every = ", ".join(functor for spec in specs for functor in spec.functors)
    return [*parts, "template <class T>", f"using AllFunctors = Functors<{every}>;\n"]


def _array(of: str, name: str, items: list[str]) -> str:
    return f"  static constexpr std::initializer_list<{of}> {name} = {{{', '.join(items)}}};"


def _state_list(state) -> str:
    code = {"signed": "i8", "unsigned": "u8", "": "f32"}[state.code]
    return f'StateList{{"{state.name}", {str(bool(state.if_set)).lower()}, DType::{code}, "{state.scales}"}}'


def _step_ops_header(specs) -> str:
    includes = [f'#include "csrc/functors/{spec.name}.h"' for spec in specs]
    parts = [_HEADER, "#include <initializer_list>\n", '#include "csrc/functors/dtype.h"', *includes, ""]
    rows = " ".join(f"OP({spec.name}, {_options(spec)}, with)" for spec in specs)
    parts += [f"#define AMPCTX_STEP_OPS(OP, with) {rows}", "\nnamespace ampctx {\n", *_functors(specs)]
    parts += [
        "struct StateList {",
        "  const char* name;",
        "  bool is_optional;",
        "  DType code;          // of 8 bits, that may hold it; f32 for none",
        "  const char* scales;  // the list of its scales",
        "};\n",
    ]
    parts += ["template <class Options>", "struct StepOp;\n"]
    for spec in specs:
        has_rule = "bias_correction" in {number.name for number in spec.numbers}
        rule = "options.beta1, options.beta2, options.bias_correction" if has_rule else "0, 0, false"
        options = f"const {_options(spec)}&{' options' if has_rule else ''}"
        sized = [_state_list(state) for state in spec.sized]
        parts += ["template <>", f"struct StepOp<{_options(spec)}> {{"]
        names = {"name": spec.op, "unscaling_name": spec.unscaling_op}
        parts += [f'  static constexpr const char* {name} = "{op}";' for name, op in names.items()]
        parts += [_array("StateList", "states", sized)]
        parts += [_array("const char*", "factors", [f'"{factor}"' for factor in spec.factors])]
        parts += [f"  static constexpr int norms = {0 if spec.elementwise else 2};  // of each tensor"]
        parts += [f"  static TensorRule rule({options}, int64_t seed) {{ return {{{rule}, seed}}; }}", "};\n"]
    return "\n".join([*parts, "}  // namespace ampctx\n"])


def _cuda_source(spec) -> str:
    return f"""// Made from ampctx/kernels/spec.py by csrc/generate.py.
#include "csrc/cuda/optimizer_apply.cuh"

namespace ampctx::cuda {{

void {spec.name}(const Context& context, const StepCall& call, const std::vector<{_options(spec)}>& rows) {{
  step(context, call, rows, decltype(functors_of<float>(rows[0])){{}});
}}

}}  // namespace ampctx::cuda
"""


def texts() -> dict[str, str]:
    """Each file by its name."""
    specs = list(load_spec().SPECS.values())
    found = {"options.h": _options_header(specs), "step_ops.h": _step_ops_header(specs)}
    return found | {f"{spec.name}.cu": _cuda_source(spec) for spec in specs if spec.elementwise}


def write(folder: Path) -> None:
    """Writes the files into ``folder``, each at once, as several builds may; compilers look there and above csrc."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts().items():
        path = folder / name
        if not (path.exists() and path.read_text() == text):
            unfinished = folder / f"{name}.{os.getpid()}"
            unfinished.write_text(text)
            os.replace(unfinished, path)


# --- ampctx/kernels/steps.py ------------------------------------------------------------------------------------------

_STEPS = '''"""Typed optimizer ops. Made from spec.py by csrc/generate.py. See ``ampctx.optimizer_ops``."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ampctx.kernels.ops import call, factor, wrote
from ampctx.kernels.reference_steps import NO_NUMBERS, NO_ROWS, WRITE_BACKS

_CODES = {name: code for code, name in enumerate(WRITE_BACKS)}

Factor = float | Tensor
'''


def _fitted(head: str, items: list[str], tail: str) -> str:
    """``head(items)tail`` on lines of at most 120 characters, as ruff formats it."""
    indent, joined = head[: len(head) - len(head.lstrip())], ", ".join(items)
    if len(f"{head}({joined}){tail}") <= 120:
        return f"{head}({joined}){tail}"
    if len(f"{indent}    {joined}") <= 120 and not head.endswith("= "):  # no tuple
        return f"{head}(\n{indent}    {joined}\n{indent}){tail}"
    lines = "".join(f"{indent}    {item},\n" for item in items)
    return f"{head}(\n{lines}{indent}){tail}"


def _step_call(spec) -> str:
    """The typed call of an op. Its arguments are all named in the source: resolving them at each call would cost as
    much as a small op."""
    lists, tensors = list(spec.lists), list(spec.tensors)
    named_lists = [*(state.scales for state in spec.coded), "skips"]
    positional = [*(f"{name}: Sequence[Tensor]" for name in lists if name not in named_lists), "found_inf: Tensor"]
    positional += [f"{name}: Factor" for name in ("inv_scale", "lr", *spec.factors)]
    named = [f"{n.name}: {n.type}" + ("" if n.default is None else f" = {n.default!r}") for n in spec.numbers]
    named += ["maximize: bool = False", 'write_back: str = "nearest"', "seed: int = 0"]
    named += ["unscale_grads: bool = False", "grad_norm: Factor = 1.0", "max_norm: float = -1.0"]
    named += [f"{name}: Sequence[Tensor] = ()" for name in named_lists]
    named += ["stochastic_state: bool = False", "numbers: Tensor = NO_NUMBERS"]
    named += ["rows: tuple[Tensor, Tensor] = NO_ROWS"]
    numbers = [number.name for number in spec.numbers]
    numbers += ["maximize", "_CODES[write_back]", "seed", "max_norm", "stochastic_state"]
    op = f'    op = "{spec.unscaling_op}" if unscale_grads else "{spec.op}"'
    scalars = ["found_inf", *(f"factor({name})" for name in tensors[1:-3]), "numbers", "*rows"]
    signature = _fitted(f"def {spec.name}", [*positional, "*", *named], " -> None:")
    body = [op, _fitted("    lists = ", lists, ""), _fitted("    call", ["op", "lists", *scalars, *numbers], "")]
    return "\n".join(
        [signature, f'    """{spec.doc}"""', *body, "    wrote(params, extras, *((grads,) if unscale_grads else ()))\n"]
    )


def steps_module() -> str:
    """The text of ampctx/kernels/steps.py."""
    return "\n\n".join([_STEPS, *map(_step_call, load_spec().SPECS.values())])


if __name__ == "__main__":
    STEPS.write_text(steps_module())
