"""Checks what nvcc has made of the hot kernels in a built library: `make machine-code`. Needs no GPU.

    python benchmarks/machine_code.py [LIBRARY]

Hot kernels walk the elements of tensors. They must keep three rules on every architecture. Exit code 1: one breaks a
rule; 2: the library, its CUDA code or cuobjdump is missing. The kernels call only slow paths of division and square
root, which return to the next instruction.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

LIBRARY = Path(__file__).resolve().parents[1] / "ampctx" / "_ops.so"
BUILD = "AMPCTX_CUDA=1 python setup.py build_ext --inplace"
PLACES, PACKAGE = ("cuobjdump", "/usr/local/cuda/bin/cuobjdump"), "nvidia-cuda-cuobjdump"
# The hot kernels that write elements, and those that only read them.
WRITING = ("scale", "axpby", "step", "lamb", "rounded_step", "rounded_lamb")
READING = ("l2norm",)
WIDE = 128  # bits of the widest access that all architectures have
CODES = 64  # bits of a thread's codes of rounded states
BYTES = 16  # of an instruction, from sm_70 on
RULES = ("no spills, no stack", f"{WIDE}-bit loads, and stores if it writes, in every hot loop", "no generic accesses")

HOT = re.compile(rf"\d({'|'.join(WRITING + READING)})_kernelI\w*Table")  # in a mangled name
ROUNDS = re.compile(r"Lb1ELb\dELb\dENS\w?_5Table")  # a kernel for rounded states, by its template arguments
SECTION = re.compile(r"^arch = (sm_\d+\w*)", re.M)
RESOURCES = re.compile(r"^ Function (\S+):\n\s+REG:\d+ STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", re.M)
INFO = re.compile(r"^\.nv\.info\.(\S+)$", re.M)
INDIRECT = re.compile(r"Offset of Indirect Branch: (0x[0-9a-f]+)\s+Number of targets: \d+\s+Targets: ([0-9a-fx ]+)")
FUNCTION = re.compile(r"^\s*Function : (\S+)$", re.M)
INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;\n]*);", re.M)


def kind(name: str) -> str:
    """Of a hot kernel, by its mangled name."""
    return ("rounded_" if ROUNDS.search(name) else "") + HOT.search(name)[1]


class Missing(Exception):
    """Something is not there that is needed to look at the code: one line, with what to do."""


Instruction = namedtuple("Instruction", "address guard name bits operands")  # such as 0x80 "!P0" "LDG" 128 "R4, [R2]"


class Code:
    """The instructions of a function, and the ways through them as places in the list."""

    def __init__(self, sass: str, info: str = "") -> None:
        self.code = []
        for at, guard, opcode, operands in INSTRUCTION.findall(sass):
            name, *parts = opcode.split(".")
            widths = [width[1] for part in parts if (width := re.fullmatch(r"[US]?(\d+)", part))]
            self.code.append(Instruction(int(at, 16), guard, name, int(widths[0]) if widths else 32, operands))
        for before, after in pairwise(self.code):
            if after.address != before.address + BYTES:
                raise ValueError(f"no instruction from {before.address:#06x} to {after.address:#06x} was understood")
        place = {instruction.address: i for i, instruction in enumerate(self.code)}
        indirect = {int(at, 16): [int(t, 16) for t in targets.split()] for at, targets in INDIRECT.findall(info)}
        self.next: list[tuple[int, ...]] = []
        for i, (address, guard, name, _, operands) in enumerate(self.code):
            after = (i + 1,) if i + 1 < len(self.code) else ()
            if name in ("EXIT", "RET", "KILL"):
                self.next.append(after if guard else ())
            elif name in ("BRX", "BRXU"):
                self.next.append(tuple(map(place.__getitem__, indirect[address])))
            elif name in ("BRA", "JMP"):
                taken = (place[int(re.search(r"0x([0-9a-f]+)\s*$", operands)[1], 16)],)
                self.next.append(taken + after if guard or "," in operands else taken)
            else:
                self.next.append(after)

    def hot_loops(self) -> dict[int, set[int]]:
        """The places of the innermost loops with wide loads, by the first one, through which all ways lead in."""
        before, left = {0: set[int]()}, [0]
        while left:
            place = left.pop()
            left += set(self.next[place]) - before.keys()
            for way in self.next[place]:
                before.setdefault(way, set()).add(place)
        wide = {i for i, one in enumerate(self.code) if one.name in ("LDG", "LD") and one.bits >= WIDE}
        found: dict[int, set[int]] = {}
        for first, lasts in before.items():
            for last in lasts if max(lasts, default=-1) >= first else ():  # compilers put one way back below the start
                body, left = {first}, [last]
                while left:
                    place = left.pop()
                    left += before[place] if place not in body else ()
                    body.add(place)
                if first == 0 or 0 not in body:  # otherwise a way around ``first`` leads to ``last``: no loop
                    found[first] = found.get(first, set()) | body
        found = {first: body for first, body in found.items() if body & wide}
        return {first: body for first, body in found.items() if not any(b < body for b in found.values())}

    def has_wide_way(self, first: int, body: set[int], stores: bool, narrowest: int) -> bool:
        """Whether an iteration can do with wide loads, wide stores where ``stores``, and none below ``narrowest``."""
        left = [(first, False, not stores)]
        seen = set(left)
        while left:
            place, loaded, stored = left.pop()
            one = self.code[place]
            if one.name in ("LDG", "LD", "STG", "ST"):
                if one.bits < narrowest and not one.guard:
                    continue
                loaded = loaded or (one.name[0] == "L" and one.bits >= WIDE)
                stored = stored or (one.name[0] == "S" and one.bits >= WIDE)
            if first in self.next[place] and loaded and stored:
                return True
            new = {(way, loaded, stored) for way in self.next[place] if way in body} - seen
            seen |= new
            left += new
        return False


def broken_rules(function: str, sass: str, info: str = "", stack: int = 0, local: int = 0) -> list[str]:
    """The rules that a hot kernel breaks."""
    code = Code(sass, info)
    names = {one.name for one in code.code}
    narrowest = CODES if function.startswith("rounded") else WIDE
    wide = [code.has_wide_way(first, body, function in WRITING, narrowest) for first, body in code.hot_loops().items()]
    broken = (stack or local or names & {"LDL", "STL"}, not wide or not all(wide), names & {"LD", "ST"})
    return [rule for rule, is_broken in zip(RULES, broken, strict=True) if is_broken]


def find_cuobjdump() -> str:
    """Of CUDA_HOME, on PATH, in /usr/local/cuda, or out of the package of the extra cuda-tools."""
    try:
        packaged = [str(f.locate()) for f in importlib.metadata.files(PACKAGE) or [] if f.name == "cuobjdump"]
    except importlib.metadata.PackageNotFoundError:
        packaged = []
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    found = next(filter(None, map(shutil.which, [f"{home}/bin/cuobjdump", *PLACES, *packaged])), None)
    if found is None:
        raise Missing("cuobjdump was not found: set CUDA_HOME, or `pip install 'ampctx[cuda-tools]'`")
    return found


def check_library(path: Path) -> None:
    """cuobjdump says of every broken library that it has no device code."""
    if not path.is_file():
        raise Missing(f"{path} was not found: build it with `{BUILD}`")
    header = path.read_bytes()[:64]
    sections, size, count = (int.from_bytes(header[a:b], "little") for a, b in ((40, 48), (58, 60), (60, 62)))
    if header[:4] != b"\x7fELF" or path.stat().st_size < sections + size * count:  # their headers come last
        raise Missing(f"{path} is no library (ELF) or was cut short: build it again with `{BUILD}`")


def check(library: Path) -> tuple[int, list[str]]:
    """How many hot kernels the library has, and a line for each rule that one breaks."""
    check_library(library)
    tool = find_cuobjdump()

    def dump(*options: str) -> str:
        done = subprocess.run([tool, *options, str(library)], capture_output=True, text=True)
        if "does not contain device code" in done.stderr + done.stdout:
            raise Missing(f"{library} has no CUDA code: install nvcc or set CUDA_HOME, then `{BUILD}`")
        if done.returncode:
            raise Missing(f"{tool} {options[0]} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
        return done.stdout

    def parts(heading: re.Pattern[str], text: str) -> list[tuple[str, str]]:
        _, *found = heading.split(text)
        return list(zip(found[::2], found[1::2], strict=True))

    hot: dict[str, dict[str, list[str]]] = {}  # of each architecture, with stack and local memory
    for arch, text in parts(SECTION, dump("-res-usage")):
        hot.setdefault(arch, {}).update({name: memory for name, *memory in RESOURCES.findall(text) if HOT.search(name)})

    def of_arch(arch: str) -> list[str]:
        sass = dict(parts(FUNCTION, dump("-sass", "-arch", arch)))
        info = dict(parts(INFO, dump("-elf", "-arch", arch)))
        return [
            f"{rule}: broken by {name} on {arch}"
            for name, memory in hot[arch].items()
            for rule in broken_rules(kind(name), sass[name], info[name], *map(int, memory))
        ]

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        broken = [line for lines in pool.map(of_arch, hot) for line in lines]
    lost = {*WRITING, *READING} - {kind(name) for kernels in hot.values() for name in kernels}
    broken += [f"the library has no {name}_kernel: mend WRITING and READING" for name in sorted(lost)]
    return sum(map(len, hot.values())), broken


def main() -> int:
    try:
        count, broken = check(Path(sys.argv[1]) if sys.argv[1:] else LIBRARY)
    except Missing as missing:
        print(missing, file=sys.stderr)
        return 2
    print("\n".join(broken) or f"{count} hot kernels keep the rules: {'; '.join(RULES)}")
    return min(len(broken), 1)


if __name__ == "__main__":
    sys.exit(main())
