"""Builds the library that runs the CUDA kernels on the CPU, and loads it."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib.util
import os
import subprocess
import sysconfig
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import torch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FOLDER = ROOT / "build" / "cuda_emulation"
THREADS_PER_BLOCK = 64  # two warps; a fiber for each makes large blocks slow
THREADS_ON_A_GPU = 256
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")


def setup_module() -> ModuleType:
    """A new setup.py, which looks at the machine as it is imported."""
    spec = importlib.util.spec_from_file_location("ampctx_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def generate(folder: Path = FOLDER) -> tuple[Path, list[str]]:
    """Writes what the build makes of ampctx/kernels/spec.py: where, and what a compiler is told to find it."""
    generated = folder / "generated"
    setup_module().generator().write(generated)
    return generated, [f"-I{generated}", f"-I{ROOT}", f"-I{sysconfig.get_path('include')}"]


def _sources(generated: Path) -> list[Path]:
    csrc = ROOT / "csrc"
    cuda = sorted([*(csrc / "cuda").glob("*.cu"), *generated.glob("*.cu")])
    return [*cuda, csrc / "library.cpp", HERE / "hooks.cpp"]


def _digest(flags: tuple[str, ...], folders: Iterable[Path]) -> str:
    digests = [setup_module().source_digest(folder) for folder in (ROOT / "csrc", HERE, *folders)]
    return hashlib.sha256(repr((flags, torch.__version__, digests)).encode()).hexdigest()[:16]


def build(folder: Path, *flags: str, threads: int = THREADS_PER_BLOCK, more: Sequence[Path] = ()) -> Path:
    """Compiles the emulation into ``folder`` unless it is there already, and returns the library's path.

    ``threads`` of a block; ``more`` C++ files of another folder, optimized. Of several processes that need it, one
    compiles.
    """
    flags = (*flags, f"-DAMPCTX_THREADS={threads}")
    library = folder / f"emulation_{_digest(flags, {path.parent for path in more})}.so"
    folder.mkdir(parents=True, exist_ok=True)
    with open(library.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(library, folder, flags, more)
    return library


def _compile(library: Path, folder: Path, flags: tuple[str, ...], more: Sequence[Path]) -> None:
    cxx = os.environ.get("CXX", "g++")
    # _FORTIFY_SOURCE would take the jumps between fibers for a corrupt stack.
    options = ["-x", "c++", "-std=c++17", "-O1", "-g1", "-fPIC", "-fvisibility=hidden", "-U_FORTIFY_SOURCE"]
    options += ["-ffp-contract=off", "-Wno-unknown-pragmas", "-DAMPCTX_CUDA_EMULATION", f"-I{HERE}"]
    generated, includes = generate(folder)
    options += [*includes, *(flag for flag in flags if not flag.startswith("-Wl,"))]
    linked = [flag for flag in flags if flag.startswith(("-Wl,", "-f"))]
    objects, commands = [], []
    for source in [*_sources(generated), *more]:
        objects.append(str(folder / f"{library.stem}_{source.parent.name}_{source.name}_{os.getpid()}.o"))
        commands.append([cxx, *options, *(["-O3"] if source in more else []), "-c", str(source), "-o", objects[-1]])
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(_run, commands))
    torch_lib = Path(torch.__file__).parent / "lib"
    unfinished = str(library.with_suffix(f".{os.getpid()}"))  # an interrupted build leaves no library
    _run([cxx, "-shared", *linked, *objects, "-o", unfinished, f"-L{torch_lib}", "-Wl,--no-as-needed", "-ltorch"])
    os.replace(unfinished, library)
    for path in objects:
        Path(path).unlink()


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{result.stderr}")


def load(path: Path | str, namespace: str) -> ctypes.CDLL:
    """Loads the library and registers its kernels for CPU tensors in ``namespace``."""
    if code := module_of(path).register("cpu", namespace):
        raise RuntimeError(f"torch refused the emulated kernels (code {code})")
    return ctypes.CDLL(str(path))


def module_of(path: Path | str) -> ModuleType:
    """The library as a module of Python, as ampctx/kernels/extension.py loads it."""
    return importlib.util.module_from_spec(importlib.util.spec_from_file_location("ampctx._ops", path))
