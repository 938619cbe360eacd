"""Writes docs/machine_code.md: what nvcc makes of the hot kernels in a built library. Needs no GPU.

    python benchmarks/machine_code.py [LIBRARY] [--check]

--check writes nothing. It fails (exit code 1) where a rule of the page is broken, or the page is not what the library
gives. Exit code 2: the library, its CUDA code or cuobjdump is missing.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cubins import Kernel, Library, Missing, Name, read
from sass import WIDE

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = Path("ampctx") / "_ops.so"
PAGE = ROOT / "docs" / "machine_code.md"
COMMAND = "make machine-code"

THREADS = 256  # kThreads of csrc/cuda/multi_tensor_apply.cuh
WARP = 32

# Kernels that walk the elements of tensors, and whether they write elements.
HOT = {
    "scale_kernel": True,
    "axpby_kernel": True,
    "l2norm_kernel": False,
    "gradient_norm_kernel": False,
    "step_kernel": True,
    "lamb_kernel": True,
    "rounded_step_kernel": True,
    "rounded_lamb_kernel": True,
    "larc_norms_kernel": False,
    "larc_kernel": True,
}

# These read codes, and look up a list's pointer at each access, which is a load where the table is on the device.
ROUNDED = {"rounded_step_kernel", "rounded_lamb_kernel"}
CODES = 64  # bits of a thread's codes, and of a pointer

# Rows of the page: function and first template arguments, where 0 and 1 are false and true, or a number of an enum.
ROWS = {
    "scale": ("scale_kernel",),
    "axpby": ("axpby_kernel",),
    "l2norm": ("l2norm_kernel",),
    "Adam": ("step_kernel", "Adam", "0", "0", "0"),
    "Adam with extras": ("step_kernel", "Adam", "0", "1", "0"),
    "AMSGrad with extras": ("step_kernel", "Adam", "1", "1", "0"),
    "Adam, rounded states": ("rounded_step_kernel", "Adam", "0"),
    "SGD with momentum": ("step_kernel", "Sgd", "1", "0", "0"),
    "LAMB, moments": ("lamb_kernel", "Walk", "0", "0", "0"),
    "LAMB, weights": ("lamb_kernel", "Walk", "1", "0", "0"),
    "LAMB, both in one": ("lamb_kernel", "Walk", "2", "0", "0"),
    "NovoGrad": ("step_kernel", "NovoGrad", "0", "0"),
    "LARC, norms": ("larc_norms_kernel",),
    "LARC, rewrite": ("larc_kernel",),
}


@dataclass(frozen=True)
class Limits:
    """Of a multiprocessor. Every one has 64 K registers in four partitions, allocated to a warp in units of 256."""

    threads: int
    blocks: int
    shared: int  # bytes
    reserved: int = 1024  # bytes of shared memory that CUDA takes for each block
    unit: int = 128  # bytes in which shared memory is allocated
    registers: int = 65536
    register_unit: int = 256
    partitions: int = 4

    def resident(self, registers: int, shared: int) -> int:
        """Blocks of THREADS threads that fit at once."""
        warps = THREADS // WARP
        of_warp = -(-registers * WARP // self.register_unit) * self.register_unit
        by_registers = self.registers // self.partitions // of_warp * self.partitions // warps
        of_block = -(-(shared + self.reserved) // self.unit) * self.unit
        by_shared = self.shared // of_block if of_block else self.blocks
        return min(self.threads // THREADS, self.blocks, by_registers, by_shared)


# CUDA Programming Guide, appendix "Compute Capabilities", table of technical specifications; what it leaves out
# (units, partitions) is in cuda_occupancy.h of the toolkit, which a test compares with this.
LIMITS = {
    75: Limits(1024, 16, 64 * 1024, reserved=0, unit=256),
    80: Limits(2048, 32, 164 * 1024),
    86: Limits(1536, 16, 100 * 1024),
    87: Limits(1536, 16, 164 * 1024),
    89: Limits(1536, 24, 100 * 1024),
    90: Limits(2048, 32, 228 * 1024),
    100: Limits(2048, 32, 228 * 1024),
    103: Limits(2048, 32, 228 * 1024),
    110: Limits(1536, 24, 228 * 1024),
    120: Limits(1536, 24, 100 * 1024),
    121: Limits(1536, 24, 100 * 1024),
}

RULES: dict[str, Callable[[Kernel], bool]] = {
    "no spilled registers and no stack": lambda kernel: not (kernel.stack or kernel.local or kernel.spills),
    f"{WIDE}-bit loads, and stores where it writes, in every hot loop": lambda kernel: (
        bool(kernel.code.hot_loops)
        and all(
            loop.has_wide_way(HOT[kernel.name.function], CODES if kernel.name.function in ROUNDED else WIDE)
            for loop in kernel.code.hot_loops
        )
    ),
    "no generic loads and stores": lambda kernel: not any(i.is_generic for i in kernel.code.code),
}


def is_hot(name: Name) -> bool:
    return name.function in HOT


def broken(library: Library) -> dict[str, list[Kernel]]:
    """The kernels that break each rule."""
    return {rule: [k for k in library.kernels if not holds(k)] for rule, holds in RULES.items()}


def of_row(library: Library, arch: int, row: str) -> list[Kernel]:
    """The kernels of a row: with the smallest table in parameters first, the table on the device last.

    Raises:
        Missing: there are none.
    """
    function, *arguments = ROWS[row]
    found = [
        k
        for k in library.kernels
        if k.arch == arch and k.name.function == function and k.name.arguments[: len(arguments)] == tuple(arguments)
    ]
    lists = min((k.name.sizes[0] for k in found), default=0)  # l2norm has two numbers of them
    found = sorted(
        (k for k in found if k.name.sizes[0] == lists), key=lambda k: (k.name.table == "DeviceTable", k.name.sizes)
    )
    if len({k.name.table for k in found}) != 2:
        raise Missing(f"sm_{arch} has no kernel for the row '{row}': mend ROWS and HOT in benchmarks/machine_code.py")
    return found


def _row(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _both(one: object, other: object) -> str:
    return str(one) if one == other else f"{one} / {other}"


def cells(kernel: Kernel) -> list[str]:
    """All of a row but its title and parameters."""
    resident = LIMITS[kernel.arch].resident(kernel.registers, kernel.shared)
    memory = f"{kernel.spills}, {kernel.stack}, {kernel.shared}"
    loops = kernel.code.hot_loops
    widths, flight = {"loads": "none", "stores": "none"}, []
    for accesses in widths if loops else ():
        counts = loops[0].widths(accesses)
        widths[accesses] = ", ".join(f"{n} x {bits}" for bits, n in counts.items()) or "none"
    for loop in loops:
        least, most = (resident * THREADS * n // 1024 for n in loop.bytes_in_flight or (0, 0))
        flight.append(f"{least} to {most}" if least < most else f"{most}")
    return [str(kernel.registers), memory, str(resident), *widths.values(), "; ".join(flight) or "none"]


def table(library: Library, arch: int) -> Iterator[str]:
    head = ("kernel", "registers", "spills, stack, shared", "blocks", "loads", "stores", "KB in flight", "parameters")
    yield _row(*head)
    yield _row(*("---" for _ in head))
    for row in ROWS:
        kernels = of_row(library, arch, row)
        small, device = kernels[0], kernels[-1]
        parameters = ", ".join(f"{n:,}" for n in sorted({k.parameters for k in kernels}))
        yield _row(row, *map(_both, cells(small), cells(device)), parameters)


def rules(library: Library) -> Iterator[str]:
    for rule, kernels in broken(library).items():
        names = sorted({str(k.name) for k in kernels})
        archs = ", ".join(f"sm_{arch}" for arch in sorted({k.arch for k in kernels}))
        shown = ", ".join(f"`{name}`" for name in names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        yield f"- {rule}: " + (f"**broken** on {archs} by {shown}" if names else "holds")


def digest() -> str:
    """Of the sources that the machine code comes from."""
    sys.path.insert(0, str(csrc := ROOT / "csrc"))
    from generate import texts

    total = hashlib.sha256(repr(sorted(texts().items())).encode())
    for path in sorted([*csrc.glob("*.h"), *csrc.glob("cuda/*"), *csrc.glob("functors/*")]):
        total.update(path.relative_to(csrc).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()[:16]


INTRO = """\
# Machine code

What nvcc makes of the hot kernels: those that walk the elements of tensors. `{command}` reads it from the built
library with cuobjdump and writes this page (`benchmarks/machine_code.py`). **Nothing here was measured on a GPU.**

- Library: nvcc {compiler} for {archs}
- Sources: sha256 `{digest}` of `csrc/*.h`, `csrc/cuda`, `csrc/functors` and what `csrc/generate.py` writes

All {count} hot kernels of each architecture must keep these rules, with every kind of table. `{command} ARGS=--check`
fails if one breaks a rule, or if this page is stale. Kernels of rounded states also have {codes}-bit accesses: codes,
and pointers in device memory.

{rules}

Columns of the tables. In a cell `a / b`, `a` is the kernel with the smallest table in its parameters, `b` the kernel
with its table in device memory.

- spills, stack, shared: spill instructions (`STL`, `LDL`), bytes of stack per thread, bytes of static shared memory
  per block.
- blocks: blocks of {threads} threads that one multiprocessor (SM) holds at once. Threads, shared memory and registers
  limit them; a warp gets registers in units of 256. The limits of each architecture come from the
  [CUDA Programming Guide](https://docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/compute-capabilities.html)
  and the toolkit's `cuda_occupancy.h`.
- loads, stores: accesses in the hot loop, by width in bits. The hot loop is the innermost loop with {wide}-bit loads;
  if there are several, the one with most. Narrow accesses serve lists whose alignment differs.
- KB in flight, per SM: resident threads times the bytes that a thread requests before it first uses a loaded register.
  The count starts at the top of the hot loop, on the paths with wide loads. `a to b`: 16-bit lists request the least,
  fp32 lists the most. `;` separates several hot loops.
- parameters: bytes per launch, for each kind of table."""


def page(library: Library) -> str:
    archs = library.archs
    count = len({kernel.name for kernel in library.kernels})
    intro = INTRO.format(
        command=COMMAND,
        compiler=library.compiler,
        archs=", ".join(f"sm_{arch}" for arch in archs),
        digest=digest(),
        count=count,
        rules="\n".join(rules(library)),
        threads=THREADS,
        wide=WIDE,
        codes=CODES,
    )
    archs_of: dict[str, list[str]] = {}  # some have the same table
    for arch in archs:
        archs_of.setdefault("\n".join(table(library, arch)), []).append(f"sm_{arch}")
    tables = [f"## {', '.join(names)}\n\n{text}" for text, names in archs_of.items()]
    return "\n\n".join([intro, *tables]) + "\n"


def built_from(text: str) -> str:
    """The compiler and architectures that a page names."""
    found = re.search(r"^- Library: (nvcc .*)$", text, re.M)
    return found[1] if found else "nothing"


def check(library: Library) -> list[str]:
    """What is wrong, in lines."""
    wrong = [f"{rule}: broken by {k.name} on sm_{k.arch}" for rule, kernels in broken(library).items() for k in kernels]
    old, new = PAGE.read_text() if PAGE.exists() else "", page(library)
    if old != new:
        where = f"docs/{PAGE.name}"
        wrong.append(f"{where} is not what this library gives: run `{COMMAND}`")
        if built_from(old) != built_from(new):
            wrong.append(f"the page is of {built_from(old)}, the library of {built_from(new)}")
        wrong += difflib.unified_diff(old.splitlines(), new.splitlines(), where, "now", n=0, lineterm="")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", nargs="?", type=Path, default=ROOT / LIBRARY, help=f"default: {LIBRARY}")
    parser.add_argument("--check", action="store_true", help="write nothing; fail on a broken rule or a stale page")
    arguments = parser.parse_args()
    try:
        library = read(arguments.library, is_hot)
        unknown = [arch for arch in library.archs if arch not in LIMITS]
        if unknown:
            raise Missing(f"no limits for sm_{unknown[0]}: add them to LIMITS in benchmarks/machine_code.py")
        if arguments.check:
            wrong = check(library)
            print("\n".join(wrong) or f"{len(library.kernels)} kernels: all rules hold, the page is up to date")
            return 1 if wrong else 0
        PAGE.write_text(page(library))
    except Missing as missing:
        print(missing, file=sys.stderr)
        return 2
    counts = ", ".join(f"{rule}: {len(kernels)} broken" for rule, kernels in broken(library).items())
    print(f"wrote {PAGE.relative_to(ROOT)} ({len(library.kernels)} kernels; {counts})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
