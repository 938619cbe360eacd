"""What cuobjdump tells of the CUDA code in a library: of each kernel its name, resources, parameters and code."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import sass

BUILD = "AMPCTX_CUDA=1 python setup.py build_ext --inplace"
PACKAGE = "nvidia-cuda-cuobjdump"
PLACES = ("cuobjdump", "/usr/local/cuda/bin/cuobjdump")
# From sm_90 on, the shared memory of a kernel that uses some counts what the driver takes for itself.
COUNTS_RESERVED, RESERVED_SHARED = 90, 1024

SECTION = re.compile(r"^arch = sm_(?=\d)", re.M)
RESOURCES = re.compile(r"^ Function (\S+):\n\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", re.M)
INFO = re.compile(r"^\.nv\.info\.(\S+)$", re.M)
PARAMETERS = re.compile(r"EIATTR_CBANK_PARAM_SIZE\n.*\n\s+Value:\s+(0x[0-9a-f]+)")
INDIRECT = re.compile(r"Offset of Indirect Branch: (0x[0-9a-f]+)\s+Number of targets: \d+\s+Targets: ([0-9a-fx ]+)")
COMPILER = re.compile(r"Tool Version: Cuda compilation tools, release \S+ V(\S+)")


class Missing(Exception):
    """Something is not there that is needed to look at the code: one line, with what to do."""


@dataclass(frozen=True)
class Name:
    """Of a kernel that is instantiated for a table, such as step_kernel<Adam, 0, 1, Table, 5, 3936>."""

    function: str
    arguments: tuple[str, ...]  # before the table
    table: str  # "Table", in the parameters, or "DeviceTable"
    sizes: tuple[int, ...]  # number of lists, and bytes in parameters

    def __str__(self) -> str:
        words = (*self.arguments, self.table, *map(str, self.sizes))
        return f"{self.function}<{', '.join(words)}>"

    @classmethod
    def parse(cls, mangled: str) -> Name | None:
        """None for other kernels."""
        words = list(_words(mangled))
        function = next((i for i, word in enumerate(words) if word.endswith("_kernel")), None)
        table = next((i for i, word in enumerate(words) if word in ("Table", "DeviceTable")), None)
        if function is None or table is None or table < function:
            return None
        end = next((i for i in range(table + 1, len(words)) if not words[i].isdecimal()), len(words))
        sizes = tuple(map(int, words[table + 1 : end]))
        return cls(words[function], tuple(words[function + 1 : table]), words[table], sizes)


def _words(mangled: str) -> Iterator[str]:
    """Names and numbers in a name as the Itanium C++ ABI mangles it; not what it abbreviates (S0_, T_)."""
    skipped, literal = re.compile(r"[ST][0-9A-Z]*_"), re.compile(r"L[a-z](\d+)E")
    length, enumerator = re.compile(r"\d+"), re.compile(r"E(\d+)E")
    at = 0
    while at < len(mangled):
        if match := skipped.match(mangled, at):
            at = match.end()
        elif match := literal.match(mangled, at):
            yield match[1]
            at = match.end()
        elif match := length.match(mangled, at):
            at = match.end() + int(match[0])
            yield mangled[match.end() : at]
            if value := enumerator.match(mangled, at):
                yield value[1]
                at = value.end()
        else:
            at += 1


@dataclass(frozen=True)
class Kernel:
    name: Name
    arch: int
    registers: int
    stack: int
    shared: int
    local: int
    parameters: int
    code: sass.Code

    @property
    def spills(self) -> int:
        """Instructions that spill a register, or read one that was spilled."""
        return sum(instruction.is_local for instruction in self.code.code)


@dataclass(frozen=True)
class Library:
    compiler: str  # version of nvcc, such as 13.0.88
    kernels: list[Kernel]

    @property
    def archs(self) -> list[int]:
        return sorted({kernel.arch for kernel in self.kernels})


def find_cuobjdump() -> str:
    """Of CUDA_HOME, on PATH, in /usr/local/cuda, or out of the package of the extra cuda-tools.

    Raises:
        Missing: it is nowhere.
    """
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    places = [f"{home}/bin/cuobjdump", *PLACES] if home else [*PLACES]
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    places += [str(file.locate()) for file in files if file.name == "cuobjdump"]
    found = next(filter(None, map(shutil.which, places)), None)
    if found is None:
        raise Missing(
            "cuobjdump was not found: set CUDA_HOME, or install it with `pip install 'ampctx[cuda-tools]'` "
            "(`make machine-code` does)"
        )
    return found


def check_library(path: Path) -> None:
    """Of all that is wrong here, cuobjdump would say that there is no device code.

    Raises:
        Missing: the file is not there, is no library, or its end is missing.
    """
    if not path.is_file():
        raise Missing(f"{path} was not found: build it with `{BUILD}`")
    with path.open("rb") as file:
        header, size = file.read(64), path.stat().st_size
    if len(header) < 64 or header[:4] != b"\x7fELF":
        raise Missing(f"{path} is no library (ELF) or was cut short: build it again with `{BUILD}`")
    (sections,) = struct.unpack_from("<Q", header, 40)  # their headers come last in the file
    whole = sections + int.from_bytes(header[58:60], "little") * int.from_bytes(header[60:62], "little")
    if size < whole:
        raise Missing(f"{path} was cut short ({size:,} bytes of {whole:,}): build it again with `{BUILD}`")


def _run(cuobjdump: str, library: Path, *options: str) -> str:
    result = subprocess.run([cuobjdump, *options, str(library)], capture_output=True, text=True)
    if "does not contain device code" in result.stderr + result.stdout:
        raise Missing(f"{library} has no CUDA code: install nvcc (or set CUDA_HOME) and build it with `{BUILD}`")
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise Missing(f"{cuobjdump} {options[0]} failed: {last}")
    return result.stdout


def _resources(usage: str) -> dict[int, dict[str, tuple[int, ...]]]:
    """Registers, bytes of stack, shared and local memory of each function of each architecture."""
    found: dict[int, dict[str, tuple[int, ...]]] = {}
    for part in SECTION.split(usage)[1:]:
        arch = int(re.match(r"\d+", part)[0])
        numbers = {mangled: tuple(map(int, four)) for mangled, *four in RESOURCES.findall(part)}
        found.setdefault(arch, {}).update(numbers)
    return found


def _kernels_of(
    cuobjdump: str, library: Path, arch: int, named: dict[Name, tuple[str, tuple[int, ...]]]
) -> tuple[str, list[Kernel]]:
    """The version of nvcc, and the kernels of one architecture; ``named``: their mangled names and resources."""
    elf = _run(cuobjdump, library, "-elf", "-arch", f"sm_{arch}")
    texts = sass.sections(sass.FUNCTION, _run(cuobjdump, library, "-sass", "-arch", f"sm_{arch}"))
    info = sass.sections(INFO, elf)
    kernels = []
    for name, (mangled, (registers, stack, shared, local)) in named.items():
        if arch >= COUNTS_RESERVED and shared >= RESERVED_SHARED:
            shared -= RESERVED_SHARED
        parameters = int(PARAMETERS.search(info[mangled])[1], 16)
        branches = INDIRECT.findall(info[mangled])
        indirect = {int(at, 16): [int(target, 16) for target in targets.split()] for at, targets in branches}
        code = sass.Code(sass.instructions(texts[mangled]), indirect)
        kernels.append(Kernel(name, arch, registers, stack, shared, local, parameters, code))
    compiler = COMPILER.search(elf)
    return compiler[1] if compiler else "unknown", kernels


def read(library: Path, wanted: Callable[[Name], bool]) -> Library:
    """The kernels that are wanted, for all architectures.

    Raises:
        Missing: the library is not there or cut short, or has no CUDA code; or there is no cuobjdump.
    """
    check_library(library)
    cuobjdump = find_cuobjdump()
    named: dict[int, dict[Name, tuple[str, tuple[int, ...]]]] = {}
    for arch, resources in _resources(_run(cuobjdump, library, "-res-usage")).items():
        for mangled, numbers in resources.items():
            if (name := Name.parse(mangled)) and wanted(name):
                named.setdefault(arch, {})[name] = mangled, numbers
    if not named:
        raise Missing(f"{library} has no machine code of the kernels: build it with `{BUILD}`")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        parts = list(pool.map(lambda arch: _kernels_of(cuobjdump, library, arch, named[arch]), sorted(named)))
    return Library(parts[0][0], [kernel for _, kernels in parts for kernel in kernels])
