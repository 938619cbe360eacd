"""Faults put into the PTX are noticed: by a check of the interpreter, or by another result."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from backends import Backend
from library import NAMESPACE
from optimizer_calls import ADAM, bits, make_call
from torch import Tensor
from translate import Module, PtxError, parse, write_program

PTX = Backend("ptx", namespace=NAMESPACE)
SIZES = [1, 7, 9, 700, 5000, 33, 4096]
ANOTHER_RESULT = "another result"


def scale() -> list[Tensor]:
    src, flag = PTX.randn(SIZES), PTX.flag()
    dst = [t * 0 for t in src]
    PTX.scale(src, dst, flag, 2.0)
    return [*src, *dst, flag]


def l2norm() -> list[Tensor]:
    flag = PTX.flag()
    return [*PTX.l2norm(PTX.randn(SIZES), flag), flag]


def adam() -> list[Tensor]:
    call = make_call(PTX, ADAM, [*SIZES, 0])
    return [t for flag in (1.0, 0.0) for _, t in call.run(PTX, found_inf=PTX.flag(flag)).clone().tensors()]


CALLS = {"scale": scale, "l2norm": l2norm, "adam": adam}
KERNELS = {"scale": "scale_kernel", "l2norm": "l2norm_kernel", "adam": "step_kernel", "steps": "advance_empty_steps"}


@dataclass
class Fault:
    """``edit`` makes the text of an entry of KERNELS[kernel] another; ``noticed`` is what a call then ends with."""

    kernel: str
    edit: Callable[[str], str]
    noticed: str


def replace(pattern: str, replacement: str, which: int = 0) -> Callable[[str], str]:
    """Replaces the match number ``which``."""

    def edit(text: str) -> str:
        match = list(re.finditer(pattern, text))[which]
        return text[: match.start()] + match.expand(replacement) + text[match.end() :]

    return edit


def in_the_walk(edit: Callable[[str], str]) -> Callable[[str], str]:
    """Edits what comes before the first ticket: behind it the last block updates the scale."""

    def edited(text: str) -> str:
        walk, ticket, rest = text.partition("atom.global")
        return edit(walk) + ticket + rest

    return edited


def replace_all(pattern: str, replacement: str) -> Callable[[str], str]:
    return lambda text: re.sub(pattern, replacement, text)


def never_leave_early(text: str) -> str:
    """Removes the first branch to the end of the entry."""
    label = re.findall(r"^(\$\w+):\s*ret;", text, re.M)[-1]
    return replace(rf"@!?%p\d+ bra(?=\s+{re.escape(label)};)", "// ")(text)


def swap_lists(text: str) -> str:
    """Takes the addresses of the last list for those of the one before. They stand last in the table."""
    places = sorted({int(place) for place in re.findall(r"ld\.param\.[bu]64[^;]*\[[^;\]]*\+(\d+)\]", text)})
    last, before = f"+{places[-1]}]", f"+{places[-2]}]"
    return text.replace(last, "+last]").replace(before, last).replace("+last]", before)


# Registers of these names are in no entry.
FIRST_WARP = "mov.u32 %r90001, %tid.x;\n setp.lt.u32 %p90001, %r90001, 32;\n"
THREAD_5 = "mov.u32 %r90001, %tid.x;\n setp.eq.s32 %p90001, %r90001, 5;\n"
BARRIER = r"bar\.sync\s+0;"
FAULTS = {
    "the first barrier removed": Fault("l2norm", replace(BARRIER, ""), "race in shared memory"),
    "a barrier for one warp": Fault(
        "l2norm", replace(BARRIER, FIRST_WARP + "@%p90001 bar.sync 0;"), "at different barriers|are at a barrier|race"
    ),
    "a thread that left before a barrier": Fault(
        "l2norm", replace(BARRIER, FIRST_WARP + "@%p90001 ret;\n bar.sync 0;"), "32 have exited"
    ),
    "a lane that has left": Fault(
        "l2norm", replace(r"(?=shfl\.sync)", THREAD_5 + "@%p90001 ret;\n"), "lanes that have exited"
    ),
    "a lane out of its own mask": Fault(
        "l2norm", replace(r"(shfl\.sync[^;]*), [^,;]+;", r"\1, 2147483647;"), "not in its own mask"
    ),
    "no write to shared memory": Fault("l2norm", replace(r"st\.shared[^;]*;", ""), "nobody has written"),
    "an index beyond shared memory": Fault(
        "l2norm", replace(r"(st\.shared\.\w+\s+\[[^\]+]*)(?:\+\d+)?\]", r"\1+4096]"), "beyond shared memory"
    ),
    "a misaligned vector": Fault(
        "scale", replace_all(r"(ld(?:\.global)?\.v4\.\w+\s[^\[]*\[%\w+)(?:\+-?\d+)?\]", r"\1+4]"), "misaligned"
    ),
    "a vector too far": Fault(
        "scale",
        replace_all(r"(st\.global\.v4\.\w+\s+\[%\w+)(?:\+-?\d+)?\]", r"\1+1073741824]"),
        "outside of what the op was given|misaligned",
    ),
    "the share of another block": Fault("scale", replace(r"%ctaid\.x", "%ntid.x"), ANOTHER_RESULT),
    "all blocks the first": Fault("scale", replace(r"mov(\.\w+\s+%\w+), %ctaid\.x", r"mov\1, 0"), "race"),
    "a share without an end": Fault(
        "scale", replace_all(r"min\.s64", "max.s64"), "race|misaligned|outside|not within a parameter"
    ),
    "lists swapped": Fault("scale", swap_lists, "only reads"),
    "twice the width": Fault(
        "scale", in_the_walk(replace(r"ld\.global\.[fbu]32", "ld.global.b64", -1)), "misaligned|outside"
    ),
    "a smaller table": Fault("scale", replace(r"(_param_0\[)\d+", r"\g<1>64"), "the host packs"),
    "a parameter less": Fault(
        "scale",
        replace(r",(?=\s*\.param [^,]*_param_3)[^)]*\)\s*(?=\.maxntid)", "\n)\n"),
        "unknown operand|nothing in the entry",
    ),
    "behind a parameter": Fault("scale", replace(r"(_param_2)\]", r"\1+16]"), "not within the parameter"),
    "fewer threads": Fault("scale", replace(r"\.maxntid 256", ".maxntid 128"), "more threads a block"),
    "a product that may be contracted": Fault("scale", replace(r"mul\.rn\.f32", "mul.f32"), "unknown opcode mul.f32"),
    "a file cut short": Fault("scale", replace(r"ret;[\s\S]*", ""), "cut short"),
    "no write to the workspace": Fault(
        "l2norm", replace_all(r"st\.global\.f32", "// st.global.f32"), "reads memory that nobody has written"
    ),
    "found_inf ignored": Fault("adam", never_leave_early, ANOTHER_RESULT),
    "no fence before a ticket": Fault("l2norm", replace(r"membar\.gl;", ""), "race: reads"),
    "no fence after a ticket": Fault("l2norm", replace(r"membar\.gl;", "", -1), "race: reads"),
    "no fence before the ticket of a step count": Fault("adam", replace(r"membar\.gl;", ""), "race: writes"),
    "a missing guard": Fault("steps", replace(r"@!?%p\d+ bra", "// "), "not within a parameter|outside|misaligned"),
    "minus for plus": Fault("adam", replace_all(r"add\.rn\.f32", "sub.rn.f32"), ANOTHER_RESULT),
    "an operand twice": Fault(
        "adam", replace_all(r"mul\.rn\.f32(\s+%\w+), (%\w+), %\w+;", r"mul.rn.f32\1, \2, \2;"), ANOTHER_RESULT
    ),
}


def launched(modules: list[Module], fault: Fault) -> tuple[Module, str]:
    """The entry that the call launches, which has the smallest table in its parameters, and its module."""
    state = {"l2norm": "5TableILi2E", "adam": "AdamIfLb0EEELb0ELb0ELb0E"}.get(fault.kernel, "")
    candidates = [
        (int(table[1]), module, entry.name)
        for module in modules
        for entry in module.entries
        if KERNELS[fault.kernel] in entry.name and state in entry.name
        if (table := re.search(r"5TableILi\d+ELi(\d+)E", entry.name))
    ]
    _, module, entry = min(candidates, key=lambda candidate: candidate[0])
    return module, entry


def plant(module: Module, entry: str, edit: Callable[[str], str]) -> Module:
    """The module with another text of the entry."""
    begin = re.search(rf"^.*\.entry\s+{entry}\(", module.text, re.M).start()
    # The last brace before another entry: a body has braces of its own.
    following = re.compile(r"\.entry\s").search(module.text, module.text.index(entry, begin))
    end = module.text.rindex("\n}", begin, following.start() if following else None) + len("\n}")
    edited = edit(module.text[begin:end])
    assert edited != module.text[begin:end]
    return parse(module.text[:begin] + edited + module.text[end:], module.file)


@pytest.fixture
def load(interpreter):
    """Loads a program for one test; returns the error, or nothing."""
    interpreter.ampctx_ptx_load.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    interpreter.ampctx_ptx_load.restype = ctypes.c_char_p
    yield lambda path: interpreter.ampctx_ptx_load(str(path).encode(), None).decode()
    ours, coverage = (os.environ[f"AMPCTX_PTX_{name}"].encode() for name in ("PROGRAM", "COVERAGE"))
    assert interpreter.ampctx_ptx_load(ours, coverage) == b""


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_a_planted_fault_is_noticed(fault, load, modules, named_functions, tmp_path):
    call = CALLS.get(fault.kernel, adam)
    expected = call()
    module, entry = launched(modules, fault)
    needed = (KERNELS["steps"], "AdamIfLb0E")  # of a call of Adam, besides
    others = [m for m in modules if m is not module and any(name in e.name for e in m.entries for name in needed)]
    try:
        write_program([plant(module, entry, fault.edit), *others], named_functions, tmp_path / "program")
        if error := load(tmp_path / "program"):
            raise RuntimeError(error)
        same = all(bits(a).equal(bits(b)) for a, b in zip(call(), expected, strict=True))
        noticed = "nothing" if same else ANOTHER_RESULT
    except (RuntimeError, PtxError) as error:
        noticed = str(error)
    assert re.search(fault.noticed, noticed), noticed
