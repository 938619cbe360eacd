"""What benchmarks/sass.py reads in machine code.

The files in sass/ are cut from what `cuobjdump -sass` prints, without the encodings: of kernels of ampctx for sm_90,
and guarded_loop.sass of a loop over one list that is fp32 or not (P0) and one that is fp32.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import sass

SNIPPETS = Path(__file__).parent / "sass"


def code_of(snippet: str) -> sass.Code:
    return sass.Code(sass.instructions((SNIPPETS / f"{snippet}.sass").read_text()))


def test_instructions_are_read():
    load, guarded = sass.instructions((SNIPPETS / "guarded_loop.sass").read_text())[4:7:2]
    assert (load.address, load.guard, load.opcode, load.bits) == (0x200, "", "LDG.E.128", 128)
    assert load.is_load
    assert [load.is_store, load.is_generic, load.is_local] == [False] * 3
    assert (guarded.guard, guarded.registers) == ("P0", {8, 28})


@pytest.mark.parametrize(
    ("opcode", "bits"),
    [("LDG.E", 32), ("STG.E.U16", 16), ("LDG.E.64.SYS", 64), ("LDG.E.LTC128B.S8", 8), ("LDG.E.ENL2.256", 256)],
)
def test_the_width_of_an_access(opcode, bits):
    assert sass.Instruction(0, "", opcode, "R0, [R2.64]").bits == bits


def test_an_instruction_that_is_not_understood_is_refused():
    text = (SNIPPETS / "spill.sass").read_text()
    without_one = "".join(line for line in text.splitlines(keepends=True) if "/*02c0*/" not in line)
    with pytest.raises(ValueError, match="no instruction between 0x02b0 and 0x02d0 was understood"):
        sass.instructions(without_one)


def test_the_loop_that_walks_the_elements_is_found():
    (loop,) = code_of("l2norm_loop").hot_loops
    assert (loop.code[0].address, loop.code[-1].address) == (0x7C0, 0x14A0)
    assert loop.widths("loads") == {128: 3, 32: 8, 16: 8}
    assert loop.widths("stores") == {}


def test_bytes_in_flight_are_those_before_the_first_use():
    # fp32 takes two loads, 16 bits take one that is converted at once; lists that are not aligned do not count.
    (loop,) = code_of("l2norm_loop").hot_loops
    assert loop.bytes_in_flight == (16, 32)


def test_guards_decide_which_loads_are_in_flight():
    (loop,) = code_of("guarded_loop").hot_loops
    assert loop.bytes_in_flight == (48, 64)


@pytest.mark.parametrize(
    ("between", "flight"),
    [
        ("SEL R8, R9, R10, P0", (16, 16)),  # reads P0: one of the two loads, whichever P0 says
        ("ISETP.NE.AND P0, PT, R9, RZ, PT", (16, 32)),  # writes it: both, or the second alone
        ("R2P PR, R9, 0x7f", (16, 32)),
    ],
)
def test_guards_that_exclude_each_other(between, flight):
    lines = ["@P0 LDG.E.128 R4, [R2.64]", between, "@!P0 LDG.E.128 R12, [R2.64]", "FADD R4, R4, R12", "@P1 BRA 0x0"]
    text = "\n".join(f"        /*{16 * i:04x}*/   {line} ;" for i, line in enumerate([*lines, "EXIT"]))
    (loop,) = sass.Code(sass.instructions(text)).hot_loops
    assert loop.bytes_in_flight == flight


def test_loads_for_the_next_iteration_are_in_flight():
    """The loads of a loop may stand behind the use of those before: they are counted across the branch back."""
    lines = ["FADD R8, R4, R5", "LDG.E.128 R4, [R2.64]", "@P0 BRA 0x0", "EXIT"]
    text = "\n".join(f"        /*{16 * i:04x}*/   {line} ;" for i, line in enumerate(lines))
    (loop,) = sass.Code(sass.instructions(text)).hot_loops
    assert loop.bytes_in_flight == (16, 16)


def test_branches_to_an_address_in_a_register_go_where_the_library_says():
    lines = ["LDG.E.128 R4, [R2.64]", "BRX R8 -0x20", "FADD R9, R4, R4", "@P0 BRA 0x0", "EXIT"]
    code = sass.instructions("\n".join(f"        /*{16 * i:04x}*/   {line} ;" for i, line in enumerate(lines)))
    assert sass.Code(code, {0x10: [0x20, 0x40]}).successors[1] == (2, 4)
    with pytest.raises(KeyError):
        sass.Code(code)
