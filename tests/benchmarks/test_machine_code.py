"""benchmarks/machine_code.py notices a kernel that breaks a rule, and says what is missing."""

from __future__ import annotations

import subprocess
import sys
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


# --- the script -------------------------------------------------------------------------------------------------------

KERNEL = "_ZN6ampctx4cuda11step_kernelINS_4AdamIfEELb0ENS0_5TableILi5ELi32604EEEEEvT1_"
USAGE = f"arch = sm_90\n\n Function {KERNEL}:\n  REG:128 STACK:88 SHARED:0 LOCAL:0 CONSTANT[0]:4536\n"
# The start of a library whose section headers, 10 of 64 bytes, end at byte 1,640.
HEADER = (b"\x7fELF" + bytes(36) + (1000).to_bytes(8, "little") + bytes(10) + b"\x40\x00\x0a\x00").ljust(64, b"\0")


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs the script on a library of so many bytes, with a cuobjdump that prints so."""

    def run(content: bytes | None, tool: str) -> subprocess.CompletedProcess:
        library, cuobjdump = tmp_path / "_ops.so", tmp_path / "bin" / "cuobjdump"
        if content is not None:
            library.write_bytes(content)
        cuobjdump.parent.mkdir()
        cuobjdump.write_text(f"#!/bin/sh\n{tool}\n")
        cuobjdump.chmod(0o755)
        monkeypatch.setenv("CUDA_HOME", str(tmp_path))
        return subprocess.run([sys.executable, machine_code.__file__, str(library)], capture_output=True, text=True)

    return run


@pytest.mark.parametrize(
    ("content", "tool", "message"),
    [
        (None, "exit 0", "_ops.so was not found: build it with `AMPCTX_CUDA=1"),
        (b"", "exit 0", "is no library (ELF) or was cut short: build it again"),
        (b"text" * 50, "exit 0", "is no library (ELF) or was cut short: build it again"),
        (HEADER.ljust(1639, b"\0"), "exit 0", "was cut short"),
        (HEADER.ljust(1640, b"\0"), "echo \"File '$2' does not contain device code\"; exit 255", "has no CUDA code"),
        (HEADER.ljust(1640, b"\0"), "echo 'no nvdisasm' >&2; exit 1", "-res-usage failed: no nvdisasm"),
    ],
)
def test_what_is_missing_is_one_line(run, content, tool, message):
    done = run(content, tool)
    assert (done.returncode, message in done.stderr, done.stderr.count("\n")) == (2, True, 1), done.stderr


def test_each_broken_rule_and_each_missing_kernel_is_a_line(run, tmp_path):
    (tmp_path / "usage").write_text(USAGE)
    (tmp_path / "sass").write_text(f"\tFunction : {KERNEL}\n{GOOD}")
    (tmp_path / "elf").write_text(f".nv.info.{KERNEL}\n")
    case = f"case $1 in -res-usage) cat {tmp_path}/usage;; -sass) cat {tmp_path}/sass;; *) cat {tmp_path}/elf;; esac"
    done = run(HEADER.ljust(1640, b"\0"), case)
    assert done.returncode == 1, done.stderr
    first, *lost = done.stdout.splitlines()
    assert first == f"{SPILLS}: broken by {KERNEL} on sm_90"
    assert len(lost) == len(machine_code.WRITING + machine_code.READING) - 1
    assert "the library has no l2norm_kernel: mend WRITING and READING" in lost
