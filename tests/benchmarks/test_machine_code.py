"""benchmarks/machine_code.py notices a kernel that breaks a rule, and says what is missing."""

from __future__ import annotations

from pathlib import Path

import machine_code
import pytest

# A loop over one list that is fp32 or not (P0) and one that is fp32, cut from what `cuobjdump -sass` prints.
GOOD = (Path(__file__).parent / "guarded_loop.sass").read_text()
SPILLS, WIDE, GENERIC = machine_code.RULES


def sass(*lines: str) -> str:
    return "\n".join(f"        /*{16 * i:04x}*/   {line} ;" for i, line in enumerate(lines))


def planted(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new)


@pytest.mark.parametrize(
    ("function", "text", "broken"),
    [
        pytest.param("step", GOOD, [], id="as-it-is"),
        pytest.param("step", planted("IADD3.X R23, RZ", "LDL.LU R23, [R1+0x3c]"), [SPILLS], id="spill"),
        pytest.param("step", planted("@P0 LDG.E.128", "@P0 LD.E.128"), [GENERIC], id="generic"),
        pytest.param("step", planted("LDG.E.128 R16", "LDG.E R16"), [WIDE], id="narrow-load"),
        pytest.param("rounded_step", planted("LDG.E.128 R16", "LDG.E.64 R16"), [], id="codes"),
        pytest.param("step", planted("STG.E.128", "STG.E"), [WIDE], id="narrow-store"),
        pytest.param("l2norm", planted("STG.E.128", "FADD"), [], id="reads-only"),
        pytest.param("step", planted("@P1 BRA", "@P1 FADD"), [WIDE], id="no-loop"),
    ],
)
def test_rules(function, text, broken):
    assert machine_code.broken_rules(function, text) == broken


@pytest.mark.parametrize("memory", [{"stack": 88}, {"local": 8}])
def test_a_stack_frame_breaks_a_rule(memory):
    assert machine_code.broken_rules("step", GOOD, **memory) == [SPILLS]


def test_branches_to_an_address_in_a_register_go_where_the_library_says():
    text = sass("LDG.E.128 R4, [R2.64]", "BRX R8 -0x20", "FADD R9, R4, R4", "@P0 BRA 0x0", "EXIT")
    info = "\t\tOffset of Indirect Branch: 0x10\t Number of targets: 2\n\t\tTargets: 0x20 0x40\x20\n"
    assert machine_code.Code(text, info).next[1] == (2, 4)
    with pytest.raises(KeyError):
        machine_code.Code(text)


def test_an_instruction_that_is_not_understood_is_refused():
    without_one = "".join(line for line in GOOD.splitlines(keepends=True) if "/*02c0*/" not in line)
    with pytest.raises(ValueError, match="no instruction from 0x02b0 to 0x02d0 was understood"):
        machine_code.Code(without_one)
