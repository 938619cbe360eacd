"""Builds ampctx/_ops.so: the CPU kernels with g++, and the CUDA kernels with nvcc if it is found.

It is also the build backend of pyproject.toml: that of setuptools, which asks pip for an nvcc where a GPU lacks one.

The build does not need torch. csrc/torch_abi.h declares the functions of torch that the library calls, and the link
uses an empty libtorch.so, so the file binds to the torch that the program imports. csrc/generate.py writes C++ headers
from ampctx/kernels/spec.py into the build folder. Environment:

    AMPCTX_KERNELS     auto (default: kernels on Linux with a C++ compiler), 1 (kernels must build), 0 (no kernels).
                       Without kernels the package is pure Python and runs on plain torch
    AMPCTX_CUDA        auto (default: CUDA kernels if nvcc is found and works, unless the installed torch has no CUDA.
                       pip brings an nvcc where there is none and a driver), 1 (there must be CUDA kernels. pip brings
                       an nvcc where there is none), 0 (no CUDA kernels)
    AMPCTX_CUDA_ARCHS  compute capabilities, such as "80,90". Default: the first of each generation that nvcc knows,
                       from 75 up. PTX is added for later GPUs
    CXX                the C++ compiler (default: g++)
    CUDA_HOME          the CUDA toolkit. Default: the nvcc on PATH, of /usr/local/cuda, of pip's packages
    MAX_JOBS           compilers at a time. Default: one for each core that this process may use
    AMPCTX_SANITIZE    1: builds the CPU kernels with AddressSanitizer and UBSan, which end the process at the first
                       report. The library then loads only with both runtimes preloaded: tests/reliability/sanitize.py
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import itertools
import json
import os
import platform
import re
import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

from setuptools import Extension, build_meta, setup
from setuptools.build_meta import *  # noqa: F403 - the hooks that a build backend has
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
    if platform.system() != "Linux":
        problem = f"they build on Linux only, and this is {platform.system()}"
    elif sysconfig.get_config_var("Py_GIL_DISABLED"):
        problem = f"a free-threaded Python lacks the stable ABI that they need. Use a Python with the GIL{AGAIN}"
    else:
        problem = why_no_compiler(cxx)
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


def module_at(path: str) -> ModuleType:
    """A module of this tree that needs neither torch nor ampctx."""
    spec = importlib.util.spec_from_file_location(f"ampctx_{Path(path).stem}", Path(__file__).parent / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def generator() -> ModuleType:
    return module_at("csrc/generate.py")


# nvcc of pip's packages, which lie together in nvidia/cu13. Those of CUDA 12 have no nvcc. The oldest of CUDA 13: any
# driver that runs its kernels also compiles its PTX.
NVCC_OF_PIP = [f"nvidia-{name}==13.0.*" for name in ("cuda-nvcc", "cuda-crt", "nvvm", "cuda-runtime", "cuda-cccl")]


def nvcc_path() -> str | None:
    if home := os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"):
        return shutil.which(f"{home}/bin/nvcc")
    places = ["nvcc", "/usr/local/cuda/bin/nvcc", *(f"{place}/nvidia/cu13/bin/nvcc" for place in sys.path)]
    return next(filter(None, map(shutil.which, places)), None)


def why_no_nvcc_of_pip() -> str:
    """Why pip's nvcc does not help where there is none, or ""."""
    if home := os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"):
        return f"{home}/bin/nvcc was not found: set CUDA_HOME, or unset it"
    driver = module_at("ampctx/kernels/cuda_support.py").driver_version()
    if driver and driver < (13, 0):
        return (
            f"nvcc was not found, and that of pip makes kernels for driver 580 or newer, while this one supports CUDA "
            f"{driver[0]}.{driver[1]}. Update the driver, or install the toolkit of CUDA {driver[0]}{AGAIN}"
        )
    if driver or choice("AMPCTX_CUDA") == "1":
        return ""
    return f"neither nvcc nor a driver was found. Install the driver, or set AMPCTX_CUDA=1{AGAIN}"


def with_nvcc(requirements: list[str]) -> list[str]:
    """What a build requires, with pip's nvcc where the CUDA kernels lack one."""
    wanted = choice("AMPCTX_CUDA")
    without = wanted == "0" or (wanted == "auto" and torch_without_cuda()) or why_no_kernels()
    return requirements if without or nvcc_path() or why_no_nvcc_of_pip() else requirements + NVCC_OF_PIP


def get_requires_for_build_wheel(config_settings: dict | None = None) -> list[str]:
    return with_nvcc(build_meta.get_requires_for_build_wheel(config_settings))


def get_requires_for_build_editable(config_settings: dict | None = None) -> list[str]:
    return with_nvcc(build_meta.get_requires_for_build_editable(config_settings))


class NoCudaError(Exception):
    """Why a build has no CUDA kernels."""


class Nvcc:
    """The CUDA compiler, its version and its architectures."""

    def __init__(self, path: str) -> None:
        self.path = path
        release = re.search(r"release ([\d.]+), V([\d.]+)", self._ask("--version"))
        self.version = release[1]
        self.name = f"nvcc {release[2]} ({'of pip' if 'nvidia/cu13' in path else path})"
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
    def find(cls, cxx: str) -> Nvcc:
        """The nvcc to build with; NoCudaError tells why there are no CUDA kernels."""
        wanted = choice("AMPCTX_CUDA")
        if wanted == "0":
            raise NoCudaError("AMPCTX_CUDA=0")
        if wanted == "auto" and (version := torch_without_cuda()):
            raise NoCudaError(f"torch {version} has no CUDA. Set AMPCTX_CUDA=1 to build CUDA kernels too{AGAIN}")
        if not (path := nvcc_path()):
            brings = "nvcc was not found. Set CUDA_HOME, or let pip build in isolation, which brings one"
            raise NoCudaError(why_no_nvcc_of_pip() or brings)
        with tempfile.TemporaryDirectory() as folder:
            probe = Path(folder, "probe.cu")
            probe.write_text("#include <cmath>\n__global__ void probe() {}\n")
            command = [
                *cls.linker(path, cxx),
                *COMMON_FLAGS,
                "-shared",
                str(probe),
                "-o",
                str(probe.with_suffix(".so")),
            ]
            done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:  # nvcc refuses compilers that are newer than it
            lines = (done.stderr + done.stdout).splitlines() or ["no message"]
            error = next((line for line in lines if "error" in line), lines[0]).strip()
            raise NoCudaError(f"{path} does not compile with {cxx}: {error}. Set CXX to a g++ that it takes{AGAIN}")
        return cls(path)

    @staticmethod
    def linker(path: str, cxx: str) -> list[str]:
        """nvcc, which adds its static runtime to what it links. It does not know where pip's has that."""
        return [path, "-ccbin", cxx, "-Xcompiler", "-fPIC", f"-L{Path(path).parents[1] / 'lib'}"]

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
        if int(self.version.partition(".")[0]) >= 13:  # drivers before 550, which CUDA 12 serves, cannot load it
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


def compile_all(cxx: str, nvcc: Nvcc | None, build: Path, why_no_cuda: str = "") -> list[str]:
    """Compiles changed sources in parallel; returns all object files. The library tells why_no_cuda.

    Compares contents, because file times mean nothing after a tree was copied or unpacked.
    """
    headers = hashlib.sha256(Path(__file__).read_bytes())
    generated = build / "generated"
    generator().write(generated)
    for path in sorted([*CSRC.rglob("*.h"), *CSRC.rglob("*.cuh"), *generated.glob("*.h")]):
        headers.update(path.as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    told = {"source": source_digest(), "cuda": nvcc and nvcc.version, "cuda_archs": nvcc.targets if nvcc else []}
    told |= {"nvcc": nvcc.name} if nvcc else {"why_no_cuda": why_no_cuda}
    info = [f"-DAMPCTX_BUILD={json.dumps(json.dumps(told)[1:-1])}", *(["-DAMPCTX_WITH_CUDA"] if nvcc else [])]
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
            line = f"[{next(count)}/{len(jobs)}] {source} {variant}".ljust(50)
            print(f"{line} {time.monotonic() - start:.1f} s\n", end="", flush=True)  # at once: other threads print, too
        else:
            next(count)
        return str(out)

    build.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS") or len(os.sched_getaffinity(0)))) as pool:
        return list(pool.map(compile_one, jobs))


def link(cxx: str, nvcc: Nvcc | None, objects: list[str], build: Path, out: Path) -> None:
    """Links against an empty libtorch.so. At run time the loader finds the one that the process imported."""
    stub(cxx, build / "libtorch.so")
    (build / "exports.map").write_text("{ global: PyInit__ops; local: *; };\n")
    out.parent.mkdir(parents=True, exist_ok=True)
    linker = Nvcc.linker(nvcc.path, cxx) if nvcc else [cxx]
    strip = [] if SANITIZE_FLAGS else ["-s"]
    options = [*strip, f"--version-script={build / 'exports.map'}", "--no-as-needed", "-ltorch", "--as-needed"]
    flags = [f"-L{build}"] + [word for option in options for word in ("-Xlinker", option)]
    command = [*linker, *SANITIZE_FLAGS, "-shared", *objects, "-o", str(out), *flags]
    run(command)
    if older := older_glibc(cxx, out, build):
        run([*command, *older])


def stub(cxx: str, library: Path, versions: dict[str, list[str]] | None = None) -> None:
    """A library without code, to link with: of symbols by their versions."""
    names = sorted(itertools.chain.from_iterable((versions or {}).values()))
    library.with_suffix(".s").write_text("".join(f".globl {name}\n.type {name},%function\n{name}:\n" for name in names))
    script = library.with_suffix(".map")
    script.write_text("".join(f"{version} {{ {'; '.join(of)}; }};\n" for version, of in (versions or {}).items()))
    options = [f"-Wl,-soname,{library.name}", *([f"-Wl,--version-script={script}"] if versions else [])]
    run([cxx, "-shared", "-nostdlib", str(library.with_suffix(".s")), *options, "-o", str(library)])


# Wheels run from the glibc on that torch's wheels need.
OLDEST_GLIBC = (2, 28)
# Where older ones have what is in libc.so.6 today.
FORMER_HOMES = {"pthread_": "libpthread.so.0", "sem_": "libpthread.so.0", "dl": "libdl.so.2", "shm_": "librt.so.1"}


def older_glibc(cxx: str, library: Path, build: Path) -> list[str]:
    """What links the library with an older glibc than this machine's: stubs whose symbols have the newest version that
    OLDEST_GLIBC knows, too. They came anew with 2.29 (pow) and 2.34 (all of libpthread, which CUDA's runtime calls)."""

    def symbols(path: str, pattern: str) -> list[tuple[str, str]]:
        shown = subprocess.run(["readelf", "-W", "--dyn-syms", path], check=True, capture_output=True, text=True).stdout
        return re.findall(rf"{pattern}(\w+)@+GLIBC_([\d.]+)", shown)

    def number(version: str) -> tuple[int, ...]:
        return tuple(map(int, version.split(".")))

    needed = symbols(str(library), "UND ") if shutil.which("readelf") else []
    newer = [name for name, version in needed if number(version) > OLDEST_GLIBC]
    stubs: dict[str, dict[str, list[str]]] = {}
    for file in ("libm.so.6", "libc.so.6") if newer else ():
        ask = subprocess.run([cxx, f"-print-file-name={file}"], check=True, capture_output=True, text=True)
        there = symbols(ask.stdout.strip(), "")
        for name in newer:
            known = [version for found, version in there if found == name and number(version) <= OLDEST_GLIBC]
            if known:
                home = next((home for start, home in FORMER_HOMES.items() if name.startswith(start)), file)
                version = f"GLIBC_{max(known, key=number)}"
                stubs.setdefault(home, {}).setdefault(version, []).append(name)
    for home, versions in stubs.items():
        stub(cxx, build / home, versions)
    return [word for home in stubs for word in ("-Xlinker", str(build / home))]


class BuildOps(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"  # no Python tag: the library fits every Python

    def build_extension(self, ext: Extension) -> None:
        cxx, why = os.environ.get("CXX", "g++"), ""
        try:
            nvcc = Nvcc.find(cxx)
        except NoCudaError as error:
            nvcc, why = None, str(error)
            if choice("AMPCTX_CUDA") == "1":
                raise CompileError(f"AMPCTX_CUDA=1, but {why}") from None
            print(f"building CPU kernels only: {why}")
        # An editable install gets a new self.build_temp each time, without the objects compiled before.
        build = Path("build/sanitized" if SANITIZE_FLAGS else "build/ops")
        link(cxx, nvcc, compile_all(cxx, nvcc, build, why), build, Path(self.get_ext_fullpath(ext.name)))


class BuildPy(build_py):
    """Leaves the reason for a build without kernels in the package. ampctx/kernels/extension.py tells it."""

    problem = ""

    def run(self) -> None:
        super().run()
        record = Path("" if self.editable_mode else self.build_lib, "ampctx", "_why_no_ops.txt")
        record.unlink(missing_ok=True)
        if self.problem:
            record.write_text(self.problem)


if __name__ == "__main__":  # others import source_digest
    BuildPy.problem = problem = why_no_kernels()
    if problem:
        print(f"ampctx is built without compiled kernels and will run on plain torch: {problem}")
    sources = [str(path) for path in sorted(CSRC.rglob("*")) if path.suffix in (".cpp", ".cu", ".h", ".cuh")]
    setup(
        ext_modules=[] if problem else [Extension("ampctx._ops", sources)],
        cmdclass={"build_ext": BuildOps, "build_py": BuildPy},
        # Py_LIMITED_API of csrc/tensors.h.
        options={} if problem else {"bdist_wheel": {"py_limited_api": "cp310"}},
    )
