"""Builds ampctx/_ops.so: the CPU kernels with g++, and the CUDA kernels with nvcc if it is found.

The build does not need torch. csrc/torch_abi.h declares the functions of torch that the library calls, and the link
uses an empty libtorch.so, so the file binds to the torch that the program imports. csrc/generate.py writes C++ headers
from ampctx/kernels/spec.py into the build folder. Environment:

    AMPCTX_KERNELS     auto (default: kernels on Linux with a C++ compiler), 1 (kernels must build), 0 (no kernels).
                       Without kernels the package is pure Python and runs on plain torch
    AMPCTX_CUDA        auto (default: CUDA kernels if nvcc is found, unless the installed torch has no CUDA),
                       1 (nvcc must be found), 0 (no CUDA kernels)
    AMPCTX_CUDA_ARCHS  compute capabilities, such as "80,90". Default: the first of each generation that nvcc knows,
                       from 75 up. PTX is added for later GPUs
    CXX                the C++ compiler (default: g++)
    CUDA_HOME          the CUDA toolkit. Default: the nvcc on PATH, then /usr/local/cuda
    AMPCTX_SANITIZE    1: builds the CPU kernels with AddressSanitizer and UBSan, which end the process at the first
                       report. The library then loads only with both runtimes preloaded: tests/reliability/sanitize.py
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import itertools
import os
import platform
import re
import shutil
import site
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError

CSRC = Path("csrc")
OLDEST_ARCH = 75
COMMON_FLAGS = ("-O3", "-std=c++17")
CXX_FLAGS = (*COMMON_FLAGS, "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")
# No FMA, so that every instruction set gives the same bits. No code reads errno or floating-point exceptions.
CXX_FLAGS += ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
# Each of SIMD_SOURCES compiles once per instruction set. Jump threading would turn vectorizable selects into branches.
SIMD_SOURCES = ("simd.cpp", "simd_optimizers.cpp")
SIMD_FLAGS = ("-fno-thread-jumps",)
SIMD = {"baseline": ()}
if platform.machine() in ("x86_64", "AMD64"):
    SIMD |= {"avx2": ("-march=x86-64-v3",), "avx512": ("-march=x86-64-v4", "-mprefer-vector-width=512")}

# The sources that nvcc compiles slowest.
LONGEST = ("lamb", "adam", "sgd", "adagrad", "lion", "muon", "elementwise")

# For speed: the build goes on without those that a compiler lacks. It needs all others.
DROPPABLE = {"-fno-math-errno", "-fno-trapping-math", "-fno-thread-jumps", "-mprefer-vector-width=512"}

SANITIZE_FLAGS = ()
if os.environ.get("AMPCTX_SANITIZE", "0") == "1":
    SANITIZE_FLAGS = ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined,float-cast-overflow")
    SANITIZE_FLAGS += ("-fno-sanitize-recover=all",)


def run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    output = result.stdout + result.stderr
    if result.returncode:
        raise CompileError(f"{' '.join(command)}\nfailed:\n{output}")
    if output.strip():
        print("+", *command, output, flush=True)


def choice(name: str) -> str:
    """The value of an environment variable: auto, 0 or 1."""
    value = os.environ.get(name, "auto")
    if value not in ("auto", "0", "1"):
        raise CompileError(f"{name}={value!r}: expected auto, 0 or 1")
    return value


@functools.cache
def accepts(cxx: str, *flags: str, source: str = "") -> bool:
    """Whether the compiler takes these flags for a small file: the kernels take minutes."""
    command = [cxx, *flags, "-x", "c++", "-fsyntax-only", "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True).returncode == 0


def without_unknown(cxx: str, flags: Iterable[str]) -> list[str]:
    """The flags without the droppable ones that the compiler lacks, or ignores with a warning."""
    lacking = {flag for flag in flags if flag in DROPPABLE and not accepts(cxx, "-Werror", flag)}
    if lacking:
        print(f"{cxx} does not know {', '.join(sorted(lacking))}: building without, slower code is possible")
    return [flag for flag in flags if flag not in lacking]


AGAIN = ", and install ampctx again, with --force-reinstall"


def why_no_compiler(cxx: str) -> str:
    """Why this compiler cannot build the kernels, or ""."""
    if not shutil.which(cxx):
        return f"no C++ compiler: {cxx!r} was not found. Install g++ 11 or newer, or set CXX{AGAIN}"
    flags = [*CXX_FLAGS, *itertools.chain(*SIMD.values())]
    if lacking := [flag for flag in flags if flag not in DROPPABLE and not accepts(cxx, flag)]:
        version = subprocess.run([cxx, "--version"], capture_output=True, text=True).stdout.partition("\n")[0]
        return (
            f"{version or cxx} found, g++ 11 or newer needed (for {', '.join(lacking)}): install it, or set CXX{AGAIN}"
        )
    if not accepts(cxx, f"-I{sysconfig.get_path('include')}", source="#include <Python.h>\n#include <string>\n"):
        return f"{cxx} finds no headers of Python or C++. Install them (apt install g++ python3-dev){AGAIN}"
    return ""


def why_no_kernels() -> str:
    """Why this build has no compiled kernels, or ""."""
    wanted, cxx = choice("AMPCTX_KERNELS"), os.environ.get("CXX", "g++")
    if wanted == "0":
        return "AMPCTX_KERNELS=0"
    is_linux = platform.system() == "Linux"
    problem = why_no_compiler(cxx) if is_linux else f"they build on Linux only, and this is {platform.system()}"
    if problem and (wanted == "1" or os.environ.get("AMPCTX_CUDA") == "1"):
        raise CompileError(f"the kernels of ampctx were asked for, but cannot be built: {problem}")
    return problem


def torch_without_cuda() -> str:
    """The version of the installed torch if it has no CUDA, or "". Reads torch/version.py: an isolated build cannot
    import torch."""
    base = {"base": sys.base_prefix, "platbase": sys.base_prefix}
    places = [*sys.path, sysconfig.get_path("purelib"), sysconfig.get_path("purelib", vars=base)]
    for place in [*places, site.getusersitepackages()]:
        version = Path(place) / "torch" / "version.py"
        if version.is_file():
            text = version.read_text()
            has_none = re.search(r"^cuda\b.*=\s*None", text, re.M)
            return re.search(r"^__version__ = ['\"](.*)['\"]", text, re.M).group(1) if has_none else ""
    return ""


def generator() -> ModuleType:
    """csrc/generate.py."""
    spec = importlib.util.spec_from_file_location("ampctx_generate", Path(__file__).parent / CSRC / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Nvcc:
    """The CUDA compiler, its version and its architectures."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.version = re.search(r"release ([\d.]+)", self._ask("--version")).group(1)
        known = sorted({int(arch) for arch in re.findall(r"compute_(\d+)\b", self._ask("--list-gpu-arch"))})
        chosen = os.environ.get("AMPCTX_CUDA_ARCHS")
        if chosen:
            self.archs = sorted(int(arch) for arch in re.findall(r"\d+", chosen))
            if not self.archs:
                raise CompileError(f"AMPCTX_CUDA_ARCHS={chosen!r}: expected compute capabilities, such as '80,90'")
            if unknown := set(self.archs) - set(known):
                raise CompileError(f"AMPCTX_CUDA_ARCHS={chosen}: this nvcc knows {known}, not {sorted(unknown)}")
        else:  # code for the first of a generation runs on all of it
            generations = {arch // 10: arch for arch in reversed(known) if arch >= OLDEST_ARCH}
            self.archs = sorted(generations.values())

    @classmethod
    def find(cls) -> Nvcc | None:
        wanted = choice("AMPCTX_CUDA")
        if wanted == "0":
            return None
        home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
        places = [f"{home}/bin/nvcc"] if home else ["nvcc", "/usr/local/cuda/bin/nvcc"]
        found = next(filter(None, map(shutil.which, places)), None)
        if found is None and wanted == "1":
            raise CompileError(f"AMPCTX_CUDA=1, but nvcc was not found: tried {' and '.join(places)}. Set CUDA_HOME")
        if found and wanted == "auto" and (version := torch_without_cuda()):
            hint = "Set AMPCTX_CUDA=1 to build CUDA kernels too."
            print(f"torch {version} has no CUDA: building CPU kernels only. {hint}")
            return None
        return cls(found) if found else None

    def _ask(self, option: str) -> str:
        return subprocess.run([self.path, option], check=True, capture_output=True, text=True).stdout

    @property
    def groups(self) -> list[list[str]]:
        """Targets that share the PTX of the first one. csrc has no code for single architectures, and nvcc 13 writes
        one PTX for all below 100, and one for all from 100 on. The last target of a group is the PTX itself, for later
        GPUs and for `make test-ptx`."""
        older, newer = ([a for a in self.archs if (a >= 100) == is_newer] for is_newer in (False, True))
        return [[*(f"sm_{arch}" for arch in group), f"compute_{group[0]}"] for group in (older, newer) if group]

    @property
    def targets(self) -> list[str]:
        return [target for group in self.groups for target in group]

    def flags(self) -> list[str]:
        flags = [*COMMON_FLAGS, "--fmad=false", "-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall"]
        if "--compress-mode" in self._ask("--help"):
            flags.append("--compress-mode=size")
        for group in self.groups:
            flags += ["-gencode", f"arch={group[0].replace('sm_', 'compute_')},code=[{','.join(group)}]"]
        return flags


def source_digest(folder: Path = CSRC) -> str:
    """A hash of the sources and of the C++ made from the specs."""
    digest = hashlib.sha256(repr(generator().texts()).encode())
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def compile_all(cxx: str, nvcc: Nvcc | None, build: Path) -> list[str]:
    """Compiles changed sources in parallel; returns all object files.

    Compares contents, because file times mean nothing after a tree was copied or unpacked.
    """
    headers = hashlib.sha256(Path(__file__).read_bytes())
    generated = build / "generated"
    generator().write(generated)
    for path in sorted([*CSRC.rglob("*.h"), *CSRC.rglob("*.cuh"), *generated.glob("*.h")]):
        headers.update(path.as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    info = [f'-DAMPCTX_SOURCE="{source_digest()}"']
    if nvcc:
        quoted = ", ".join(f'"{target}"' for target in nvcc.targets)
        info += ["-DAMPCTX_WITH_CUDA", f'-DAMPCTX_CUDA_VERSION="\\"{nvcc.version}\\""']
        info += ["-DAMPCTX_CUDA_ARCHS=" + '"' + quoted.replace('"', '\\"') + '"']
    x86 = ["-DAMPCTX_SIMD_X86_64"] if len(SIMD) > 1 else []

    includes = [f"-I{generated}", "-I.", f"-I{sysconfig.get_path('include')}"]
    cxx_flags = [*without_unknown(cxx, CXX_FLAGS), *SANITIZE_FLAGS, *includes]
    simd_flags = {isa: without_unknown(cxx, (*SIMD_FLAGS, *SIMD[isa])) for isa in SIMD}
    jobs = []
    for source in sorted([CSRC / "library.cpp", *(CSRC / "cpu").glob("*.cpp")]):
        if source.name in SIMD_SOURCES:
            jobs += [(source, [cxx, *cxx_flags, *simd_flags[isa], f"-DAMPCTX_SIMD_NAME={isa}"], isa) for isa in SIMD]
        else:
            jobs.append((source, [cxx, *cxx_flags, *x86, *(info if source.name == "library.cpp" else [])], ""))
    if nvcc:  # slowest first, so that all cores finish together
        cuda = sorted([*(CSRC / "cuda").glob("*.cu"), *generated.glob("*.cu")])
        cuda.sort(key=lambda source: LONGEST.index(source.stem) if source.stem in LONGEST else len(LONGEST))
        jobs = [(source, [nvcc.path, "-ccbin", cxx, *nvcc.flags(), *includes], "") for source in cuda] + jobs

    count = itertools.count(1)

    def compile_one(job: tuple[Path, list[str], str]) -> str:
        source, command, variant = job
        out = build / f"{source.parent.name}_{source.stem}{variant and '_' + variant}.o"
        record, made_of = out.with_suffix(".made_of"), headers.copy()
        of_nvcc = nvcc.version if nvcc and source.suffix == ".cu" else ""  # C++ is the same with and without
        made_of.update(repr((command, of_nvcc)).encode() + source.read_bytes())
        if not (out.exists() and record.exists() and record.read_text() == made_of.hexdigest()):
            record.unlink(missing_ok=True)
            start = time.monotonic()
            run([*command, "-c", str(source), "-o", str(out)])
            record.write_text(made_of.hexdigest())
            took = f"{time.monotonic() - start:.1f} s"
            print(f"[{next(count)}/{len(jobs)}] {source} {variant}".ljust(50), took, flush=True)
        else:
            next(count)
        return str(out)

    build.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compile_one, jobs))


def link(cxx: str, nvcc: Nvcc | None, objects: list[str], build: Path, out: Path) -> None:
    """Links against an empty libtorch.so. At run time the loader finds the one that the process imported."""
    (build / "stub.c").write_text("")
    run([cxx, "-shared", "-x", "c", str(build / "stub.c"), "-Wl,-soname,libtorch.so", "-o", str(build / "libtorch.so")])
    out.parent.mkdir(parents=True, exist_ok=True)
    linker = [nvcc.path, "-ccbin", cxx] if nvcc else [cxx]  # nvcc adds its static runtime
    strip = [] if SANITIZE_FLAGS else ["-s"]
    options = [*strip, "--exclude-libs=ALL", "--no-as-needed", "-ltorch", "--as-needed"]
    flags = [f"-L{build}"] + [word for option in options for word in ("-Xlinker", option)]
    run([*linker, *SANITIZE_FLAGS, "-shared", *objects, "-o", str(out), *flags])


class BuildOps(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"  # no Python tag: the library fits every Python

    def build_extension(self, ext: Extension) -> None:
        cxx, nvcc = os.environ.get("CXX", "g++"), Nvcc.find()
        # An editable install gets a new self.build_temp each time, without the objects compiled before.
        build = Path("build/ops")
        link(cxx, nvcc, compile_all(cxx, nvcc, build), build, Path(self.get_ext_fullpath(ext.name)))


class BuildPy(build_py):
    """Leaves the reason for a build without kernels in the package. ampctx/kernels/extension.py tells it."""

    problem = ""

    def run(self) -> None:
        super().run()
        record = Path("" if self.editable_mode else self.build_lib, "ampctx", "_why_no_ops.txt")
        record.unlink(missing_ok=True)
        if self.problem:
            record.write_text(self.problem)


class AnyPythonWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


if __name__ == "__main__":  # others import source_digest
    BuildPy.problem = problem = why_no_kernels()
    if problem:
        print(f"ampctx is built without compiled kernels and will run on plain torch: {problem}")
    sources = [str(path) for path in sorted(CSRC.rglob("*")) if path.suffix in (".cpp", ".cu", ".h", ".cuh")]
    setup(
        ext_modules=[] if problem else [Extension("ampctx._ops", sources)],
        cmdclass={"build_ext": BuildOps, "build_py": BuildPy, "bdist_wheel": AnyPythonWheel},
    )
