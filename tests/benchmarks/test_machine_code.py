"""What benchmarks/machine_code.py tells of a library, and the rules that the hot kernels of the built one keep."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import cubins
import machine_code
import pytest
import sass
from cubins import Kernel, Library, Missing, Name
from test_sass import SNIPPETS, code_of

NO_SPILLS, WIDE, NO_GENERIC = machine_code.RULES
STEP = Name("step_kernel", ("Adam", "0", "0"), "Table", (4, 3936))


def a_kernel(snippet: str = "guarded_loop", name: Name = STEP, stack: int = 0, local: int = 0) -> Kernel:
    return Kernel(name, 90, 32, stack, 0, local, 4016, code_of(snippet))


def rules_broken_by(kernel: Kernel) -> list[str]:
    return [rule for rule, holds in machine_code.RULES.items() if not holds(kernel)]


# --- rules ------------------------------------------------------------------------------------------------------------


def test_spills_are_seen():
    kernel = a_kernel("spill")
    assert kernel.spills == 3
    assert not machine_code.RULES[NO_SPILLS](kernel)


@pytest.mark.parametrize("memory", [{"stack": 88}, {"local": 8}])
def test_a_stack_frame_breaks_the_rule(memory):
    assert rules_broken_by(a_kernel()) == []
    assert rules_broken_by(a_kernel(**memory)) == [NO_SPILLS]


def test_generic_accesses_are_seen():
    code = sass.instructions((SNIPPETS / "generic.sass").read_text())
    assert [i.opcode for i in code if i.is_generic] == ["LD.E.128"] * 2
    assert {i.bits for i in code if i.is_load} == {128}
    assert not machine_code.RULES[NO_GENERIC](a_kernel("generic"))


def test_a_loop_without_wide_accesses_breaks_the_rule():
    text = (SNIPPETS / "guarded_loop.sass").read_text()
    for narrowed in ("LDG.E.128 R16", "STG.E.128"):
        wide = narrowed.split()[0]
        narrow = text.replace(narrowed, narrowed.replace(wide, wide.removesuffix(".128")))
        assert narrow != text
        kernel = Kernel(STEP, 90, 32, 0, 0, 0, 4016, sass.Code(sass.instructions(narrow)))
        assert rules_broken_by(kernel) == [WIDE]


def test_kernels_of_rounded_states_may_have_accesses_of_codes_beside_wide_ones():
    text = (SNIPPETS / "guarded_loop.sass").read_text()
    rounded = Name("rounded_step_kernel", ("Adam", "0"), "DeviceTable", (8,))
    wide = re.search(r"LDG\.E\.128", text)
    for bits, breaks in (("64", []), ("32", [WIDE])):
        opcode = "LDG.E" if bits == "32" else f"LDG.E.{bits}"
        one = text[: wide.start()] + opcode + text[wide.end() :]
        code = sass.Code(sass.instructions(one))
        assert rules_broken_by(Kernel(STEP, 90, 32, 0, 0, 0, 4016, code)) == [WIDE]
        assert rules_broken_by(Kernel(rounded, 90, 32, 0, 0, 0, 4016, code)) == breaks
    none = sass.Code(sass.instructions(text.replace("LDG.E.128", "LDG.E.64")))
    assert rules_broken_by(Kernel(rounded, 90, 32, 0, 0, 0, 4016, none)) == [WIDE]


def test_kernels_that_write_nothing_need_no_stores():
    reading = Name("l2norm_kernel", (), "Table", (1, 3936))
    assert rules_broken_by(a_kernel("l2norm_loop", reading)) == []
    assert rules_broken_by(a_kernel("l2norm_loop")) == [WIDE]


# --- names and resources ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mangled", "name"),
    [
        (
            "_ZN6ampctx4cuda11step_kernelINS_4AdamIfLb1EEELb0ENS0_5TableILi5ELi32604EEEEEvT1_lNS0_14StepParametersET_"
            "PKNS_13TensorScalarsIfEE",
            "step_kernel<Adam, 1, 0, Table, 5, 32604>",
        ),
        (
            "_ZN6ampctx4cuda53_GLOBAL__N__e39b9a08_20_multi_tensor_lamb_cu_e1d6b70511lamb_kernelILNS1_4WalkE2ELb1ENS0_"
            "11DeviceTableILi5EEEEEvT1_lNS1_14LambParametersEPKNS_13TensorScalarsIfEE",
            "lamb_kernel<Walk, 2, 1, DeviceTable, 5>",
        ),
        (
            "_ZN6ampctx4cuda54_GLOBAL__N__2e6c415a_21_multi_tensor_scale_cu_7374b94d12scale_kernelINS0_5TableILi2ELi3936"
            "EEEEEvT_lNS_8FoundInfENS0_12KernelFactorE",
            "scale_kernel<Table, 2, 3936>",
        ),
        (
            "_ZN6ampctx4cuda55_GLOBAL__N__dc6fd52f_22_multi_tensor_l2norm_cu_cc20fbe819l2norm_total_kernelEPKflPf",
            "None",
        ),
    ],
)
def test_names_are_read(mangled, name):
    assert str(Name.parse(mangled)) == name


USAGE = """
Fatbin elf code:
================
arch = sm_90
code version = [1,8]
host = linux
compile_size = 64bit
compressed

Resource usage:
 Common:
  GLOBAL:0
 Function _ZN6ampctx4cuda11step_kernelINS_4AdamIfLb1EEELb1ENS0_5TableILi6ELi3936EEEEEvT1_:
  REG:128 STACK:88 SHARED:0 LOCAL:0 CONSTANT[2]:12 CONSTANT[0]:4536 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


def test_resources_are_read():
    sm_100 = USAGE.replace("sm_90", "sm_100").replace("STACK:88", "STACK:0")
    (mangled,) = re.findall(r"Function (\S+):", USAGE)
    assert cubins._resources(USAGE + sm_100) == {90: {mangled: (128, 88, 0, 0)}, 100: {mangled: (128, 0, 0, 0)}}


ATTRIBUTES = """
\tAttribute:\tEIATTR_INDIRECT_BRANCH_TARGETS
\tFormat:\tEIFMT_SVAL
\tValue:\t
\t\tOffset of Indirect Branch: 0xee50\t Number of targets: 3
\t\tTargets: 0xee90 0xee60 0xeeb0\x20

\t<0x13>
\tAttribute:\tEIATTR_CBANK_PARAM_SIZE
\tFormat:\tEIFMT_HVAL
\tValue:\t0xf90
"""


def test_parameters_and_targets_of_branches_are_read():
    assert cubins.PARAMETERS.search(ATTRIBUTES)[1] == "0xf90"
    assert [(at, targets.split()) for at, targets in cubins.INDIRECT.findall(ATTRIBUTES)] == [
        ("0xee50", ["0xee90", "0xee60", "0xeeb0"])
    ]


OCCUPANCY = """
#include <cstdio>
#include <cuda_occupancy.h>

// Reads "arch threads shared reserved registers used_shared", prints the resident blocks of 256 threads.
int main() {
  int arch, threads, shared, reserved, registers, used;
  while (std::scanf("%d %d %d %d %d %d", &arch, &threads, &shared, &reserved, &registers, &used) == 6) {
    cudaOccDeviceProp device;
    device.computeMajor = arch / 10;
    device.computeMinor = arch % 10;
    device.maxThreadsPerBlock = 1024;
    device.maxThreadsPerMultiprocessor = threads;
    device.regsPerBlock = device.regsPerMultiprocessor = 65536;
    device.warpSize = 32;
    device.sharedMemPerBlock = 48 * 1024;
    device.sharedMemPerMultiprocessor = shared;
    device.numSms = 1;
    device.sharedMemPerBlockOptin = shared - reserved;
    device.reservedSharedMemPerBlock = reserved;
    cudaOccFuncAttributes function;
    function.maxThreadsPerBlock = 256;
    function.numRegs = registers;
    function.sharedSizeBytes = used;
    cudaOccDeviceState state;
    cudaOccResult result;
    const cudaOccError error = cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &function, &state, 256, 0);
    std::printf("%d\\n", error == CUDA_OCC_SUCCESS ? result.activeBlocksPerMultiprocessor : -1);
  }
}
"""


def test_resident_blocks_are_those_of_the_toolkit(tmp_path):
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc, for its cuda_occupancy.h")
    source, program = tmp_path / "occupancy.cu", tmp_path / "occupancy"
    source.write_text(OCCUPANCY)
    subprocess.run([nvcc, "-o", str(program), str(source)], check=True)
    asked = [
        (arch, registers, used)
        for arch in machine_code.LIMITS
        for registers in range(16, 256)
        for used in (0, 32, 3000, 20000)
    ]
    of = machine_code.LIMITS
    lines = [f"{a} {of[a].threads} {of[a].shared} {of[a].reserved} {r} {used}" for a, r, used in asked]
    answers = subprocess.run([str(program)], input="\n".join(lines), capture_output=True, text=True, check=True)
    expected = list(map(int, answers.stdout.split()))
    assert [of[arch].resident(registers, used) for arch, registers, used in asked] == expected


# --- what is missing --------------------------------------------------------------------------------------------------


@pytest.fixture
def run(monkeypatch, capsys):
    """Exit code and error of the script for a library."""

    def run(library: Path) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["machine_code.py", str(library), "--check"])
        code = machine_code.main()
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        return code, error

    return run


def elf(size: int) -> bytes:
    """The start of a library whose section headers, 10 of 64 bytes, begin at byte 1,000."""
    header = bytearray(64)
    header[:4], header[40:48], header[58:62] = b"\x7fELF", (1000).to_bytes(8, "little"), b"\x40\x00\x0a\x00"
    return bytes(header).ljust(size, b"\0")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "_ops.so was not found: build it with `AMPCTX_CUDA=1"),
        (b"", "is no library (ELF) or was cut short: build it again"),
        (b"text" * 50, "is no library (ELF) or was cut short: build it again"),
        (elf(1639), r"was cut short (1,639 bytes of 1,640): build it again"),
    ],
)
def test_a_library_that_is_missing_or_cut_short(run, tmp_path, content, message):
    library = tmp_path / "_ops.so"
    if content is not None:
        library.write_bytes(content)
    code, error = run(library)
    assert (code, message in error) == (2, True), error


def test_without_cuobjdump(run, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(cubins, "PLACES", ("cuobjdump-that-is-nowhere",))
    monkeypatch.setattr(cubins, "PACKAGE", "a-package-that-is-nowhere")
    library = tmp_path / "_ops.so"
    library.write_bytes(elf(1640))
    code, error = run(library)
    assert (code, "cuobjdump was not found: set CUDA_HOME, or install it" in error) == (2, True), error


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            "echo \"cuobjdump info    : File '$2' does not contain device code\"; exit 255",
            "has no CUDA code: install nvcc",
        ),
        ("echo \"cuobjdump fatal   : Could not find executable file 'nvdisasm'\" >&2; exit 1", "find executable file"),
        ("exit 0", "has no machine code of the kernels"),
    ],
)
def test_what_cuobjdump_refuses(run, tmp_path, monkeypatch, script, message):
    tool = tmp_path / "bin" / "cuobjdump"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    library = tmp_path / "_ops.so"
    library.write_bytes(elf(1640))
    code, error = run(library)
    assert (code, message in error) == (2, True), error


def test_a_library_without_cuda_code(run, tmp_path):
    try:
        cubins.find_cuobjdump()
    except Missing as missing:
        pytest.skip(str(missing))
    library = tmp_path / "_ops.so"
    subprocess.run(["g++", "-shared", "-x", "c", "/dev/null", "-o", str(library)], check=True)
    code, error = run(library)
    assert (code, f"{library} has no CUDA code: install nvcc" in error) == (2, True), error


# --- the page ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def made_up() -> Library:
    """A library with a kernel for each row and kind of table."""
    names = [Name(row[0], (*row[1:],), *table) for row in machine_code.ROWS.values() for table in TABLES]
    return Library("13.0.88", [a_kernel(name=name) for name in names])


TABLES = (("DeviceTable", (4,)), ("Table", (4, 32604)), ("Table", (4, 3936)))


def test_a_row_has_the_smallest_table_first_and_the_device_table_last(made_up):
    kernels = machine_code.of_row(made_up, 90, "Adam")
    assert [(k.name.table, k.name.sizes) for k in kernels] == [TABLES[2], TABLES[1], TABLES[0]]


def test_a_row_without_kernels_is_refused(made_up):
    fewer = Library("13.0.88", [k for k in made_up.kernels if k.name.function != "larc_kernel"])
    with pytest.raises(Missing, match="sm_90 has no kernel for the row 'LARC, rewrite': mend ROWS and HOT"):
        machine_code.page(fewer)


def test_the_page_has_a_table_of_each_architecture(made_up):
    page = machine_code.page(made_up)
    assert "nvcc 13.0.88 for sm_90\n" in page
    assert page.count("\n- ") == 2 + len(machine_code.RULES) + 5
    assert page.count("holds\n") == len(machine_code.RULES)
    # 8 blocks of 256 threads, as 32 registers let all 2,048 threads in; 48 and 64 bytes each.
    assert "\n| Adam | 32 | 0, 0, 0 | 8 | 4 x 128 | 1 x 128 | 96 to 128 | 4,016 |\n" in page


def test_the_page_names_the_kernels_that_break_a_rule(made_up):
    made_up.kernels[:1] = [a_kernel(name=made_up.kernels[0].name, stack=8)]
    assert f"\n- {NO_SPILLS}: **broken** on sm_90 by `scale_kernel<DeviceTable, 4>`\n" in machine_code.page(made_up)
    assert f"{NO_SPILLS}: broken by scale_kernel<DeviceTable, 4> on sm_90" in machine_code.check(made_up)


def test_a_stale_page_is_told_from_what_is_new(made_up, tmp_path, monkeypatch):
    monkeypatch.setattr(machine_code, "PAGE", tmp_path / "machine_code.md")
    stale = "docs/machine_code.md is not what this library gives: run `make machine-code`"
    assert machine_code.check(made_up)[:2] == [stale, "the page is of nothing, the library of nvcc 13.0.88 for sm_90"]
    machine_code.PAGE.write_text(machine_code.page(made_up))
    assert machine_code.check(made_up) == []
    machine_code.PAGE.write_text(machine_code.page(made_up).replace("| Adam | 32 |", "| Adam | 31 |"))
    wrong = machine_code.check(made_up)
    assert wrong[0] == stale
    assert [line for line in wrong if line.startswith(("-| ", "+| "))] == [
        f"{sign}| Adam | {n} | 0, 0, 0 | 8 | 4 x 128 | 1 x 128 | 96 to 128 | 4,016 |"
        for sign, n in (("-", 31), ("+", 32))
    ]


# --- the library that is built ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def library() -> Library:
    """The hot kernels of all architectures; takes half a minute."""
    try:
        return cubins.read(machine_code.ROOT / machine_code.LIBRARY, machine_code.is_hot)
    except Missing as missing:
        # All else that can be missing is an error: such a library must not pass.
        if any(reason in str(missing) for reason in ("was not found", "has no CUDA code", "nvdisasm")):
            pytest.skip(str(missing))
        raise


@pytest.mark.full
@pytest.mark.parametrize("rule", machine_code.RULES)
def test_hot_kernels_keep_the_rules(library, rule):
    broken = machine_code.broken(library)[rule]
    assert not broken, "\n".join(f"sm_{kernel.arch} {kernel.name}" for kernel in broken)


@pytest.mark.full
def test_every_row_has_its_kernels(library):
    for arch in library.archs:
        for row in machine_code.ROWS:
            first, *_, last = machine_code.of_row(library, arch, row)
            assert (first.name.table, last.name.table) == ("Table", "DeviceTable")
            assert 0 < last.parameters < first.parameters <= 32764
    assert {kernel.name.function for kernel in library.kernels} == set(machine_code.HOT)


@pytest.mark.full
def test_the_page_is_what_the_library_gives(library):
    written, now = machine_code.PAGE.read_text(), machine_code.page(library)
    of = machine_code.built_from
    if of(written) != of(now):
        pytest.skip(f"the page is of {of(written)}, the library that is built of {of(now)}")
    assert written == now, f"run: {machine_code.COMMAND}"
    assert len(written.splitlines()) < 150


def test_the_threads_of_a_block_are_those_of_the_kernels():
    header = (machine_code.ROOT / "csrc/cuda/multi_tensor_apply.cuh").read_text()
    assert re.search(r"#define AMPCTX_THREADS (\d+)", header)[1] == str(machine_code.THREADS)
