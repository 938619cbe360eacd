"""Takes the PTX out of the built extension, and builds the library that runs it on the CPU.

library = build()                                   # the interpreter with the host code of csrc/cuda
write_program(modules, functions(library), path)    # translate.py; AMPCTX_PTX_PROGRAM=path for the process
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.append(str(HERE.parent / "cuda_emulation"))

import emulation_build  # noqa: E402
from translate import Module, PtxError, parse  # noqa: E402

NAMESPACE = "ampctx_ptx"
FOLDER = ROOT / "build" / "ptx"
EXTENSION = ROOT / "ampctx" / "_ops.so"
THREADS_PER_BLOCK = 256  # as in csrc/cuda/multi_tensor_apply.cuh, for which nvcc has compiled
WRAPPED = ("torch_get_const_data_ptr", "torch_get_mutable_data_ptr", "torch_library_impl")
REBUILD = "build it with 'AMPCTX_CUDA=1 pip install .'"


def find_tool(name: str) -> str | None:
    """A program of the CUDA toolkit: from PATH, CUDA_HOME, or the package that has it."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    places = [name, *(f"{home}/bin/{name}" for home in homes if home)]
    package = importlib.util.find_spec("nvidia")
    for folder in (package.submodule_search_locations or ()) if package else ():
        places += map(str, sorted(Path(folder).glob(f"cu*/bin/{name}")))
    return next(filter(None, map(shutil.which, places)), None)


def is_whole(extension: Path) -> bool:
    """Whether the table of sections, which ends an ELF file, is there. Opening another may kill the process."""
    content = extension.read_bytes()
    if len(content) < 64 or content[:4] != b"\x7fELF":
        return False
    (table,) = struct.unpack_from("<Q", content, 0x28)
    size, count = struct.unpack_from("<HH", content, 0x3A)
    return table + size * count <= len(content)


def built_from(extension: Path) -> str | None:
    """The digest of the sources that the library was built from; None where it does not say."""
    match = re.search(rb'"source": "(\w+)"', extension.read_bytes())
    return match[1].decode() if match else None


def source_digest() -> str:
    """The same of the sources here, as setup.py takes it."""
    spec = importlib.util.spec_from_file_location("ampctx_setup", ROOT / "setup.py")
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    return setup.source_digest(ROOT / "csrc")


def extract(extension: Path) -> dict[str, list[Module]]:
    """The PTX files of each target in the library, after looking whether it is whole and of these sources."""
    if not extension.exists():
        raise PtxError(f"{extension} does not exist: {REBUILD}")
    tool = find_tool("cuobjdump")
    if tool is None:
        raise PtxError("cuobjdump was not found: pip install nvidia-cuda-cuobjdump, or set CUDA_HOME")
    if not is_whole(extension):
        raise PtxError(f"{extension} is no library, or was cut short: {REBUILD}")
    built, here = built_from(extension), source_digest()
    if built != here:
        raise PtxError(f"{extension} was built from other sources ({built or 'unknown'}) than csrc ({here}): {REBUILD}")
    with tempfile.TemporaryDirectory() as folder:
        result = subprocess.run([tool, "-xptx", "all", str(extension)], cwd=folder, capture_output=True, text=True)
        files = sorted(Path(folder).glob("*.ptx"))
        if not files:
            why = (result.stderr or result.stdout).strip().splitlines()[:1]
            raise PtxError(f"{extension} has no PTX ({why[0] if why else 'built without nvcc'}): {REBUILD}")
        modules = [parse(file.read_text(), file.name) for file in files]
    generations: dict[str, list[Module]] = {}
    for module in modules:
        generations.setdefault(module.target, []).append(module)
    return generations


def build() -> Path:
    flags = ["-O0", *(f"-Wl,--wrap={name}" for name in WRAPPED)]
    return emulation_build.build(FOLDER, *flags, threads=THREADS_PER_BLOCK, more=sorted(HERE.glob("*.cpp")))


def functions(library: Path) -> dict[int, str]:
    """The name of each function of the library, at its offset."""
    listed = subprocess.run(["nm", str(library)], check=True, capture_output=True, text=True).stdout
    symbols = (line.split() for line in listed.splitlines())
    return {int(words[0], 16): words[2] for words in symbols if len(words) == 3 and words[1] in "tTwWuV"}
