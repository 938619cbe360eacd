"""Takes the PTX out of the built extension, and builds the library that runs it on the CPU.

library = build()                                   # the interpreter with the host code of csrc/cuda
write_program(modules, functions(library), path)    # translate.py; AMPCTX_PTX_PROGRAM=path for the process
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path += [str(HERE.parent / "cuda_emulation"), str(ROOT / "benchmarks")]

import emulation_build  # noqa: E402
import machine_code  # noqa: E402
from translate import Module, PtxError, parse  # noqa: E402

NAMESPACE = "ampctx_ptx"
FOLDER = ROOT / "build" / "ptx"
EXTENSION = ROOT / "ampctx" / "_ops.so"
WRAPPED = ("torch_get_const_data_ptr", "torch_get_mutable_data_ptr", "aoti_torch_empty_strided", "torch_library_impl")
REBUILD = f"build it with `{machine_code.BUILD}`"


def built_from(extension: Path) -> str | None:
    """The digest of the sources that the library was built from; None where it does not say."""
    match = re.search(rb'"source": "(\w+)"', extension.read_bytes())
    return match[1].decode() if match else None


def extract(extension: Path, target: str | None = None) -> dict[str, list[Module]]:
    """The PTX files of each target in the library, or of one, once it is known to be whole and of these sources."""
    try:
        machine_code.check_library(extension)
        tool = machine_code.find_cuobjdump()
    except machine_code.Missing as missing:
        raise PtxError(str(missing)) from None
    built, here = built_from(extension), emulation_build.setup_module().source_digest(ROOT / "csrc")
    if built != here:
        raise PtxError(f"{extension} was built from other sources ({built or 'unknown'}) than csrc ({here}): {REBUILD}")
    with tempfile.TemporaryDirectory() as folder:
        result = subprocess.run([tool, "-xptx", "all", str(extension)], cwd=folder, capture_output=True, text=True)
        files = sorted(Path(folder).glob(f"*.{target}.ptx" if target else "*.ptx"))
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
    return emulation_build.build(
        FOLDER, *flags, threads=emulation_build.THREADS_ON_A_GPU, more=sorted(HERE.glob("*.cpp"))
    )


def functions(library: Path) -> dict[int, str]:
    """The name of each function of the library, at its offset."""
    listed = subprocess.run(["nm", str(library)], check=True, capture_output=True, text=True).stdout
    symbols = (line.split() for line in listed.splitlines())
    return {int(words[0], 16): words[2] for words in symbols if len(words) == 3 and words[1] in "tTwWuV"}
