"""Builds ampctx/_ops.so: the CPU kernels with g++, and the CUDA kernels with nvcc where it is found.

torch is not needed to build: csrc/torch_abi.h declares what is called, and the link goes against an empty libtorch.so,
so that the file binds to whichever torch is imported. csrc/generate.py writes what C++ has of ampctx/kernels/spec.py
into the build folder. Environment:

    AMPCTX_CUDA        auto (default: CUDA kernels when nvcc is found), 1 (nvcc must be there), 0 (no CUDA kernels)
    AMPCTX_CUDA_ARCHS  compute capabilities, such as "80,90"; default: the first of each generation that nvcc knows,
                       from 75 up. PTX is added for those after the last, and for what compiles to other PTX
    CXX                the C++ compiler (default: g++)
    CUDA_HOME          where CUDA is; default: the nvcc on PATH, then /usr/local/cuda
    AMPCTX_SANITIZE    1: the CPU kernels with AddressSanitizer and UBSan, which end the process at the first report.
                       Such a library loads only with both runtimes preloaded: tests/reliability/sanitize.py
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

CSRC = Path("csrc")
OLDEST_ARCH = 75
COMMON_FLAGS = ("-O3", "-std=c++17")
CXX_FLAGS = (*COMMON_FLAGS, "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")
# Same bits on every instruction set: no contraction to FMA. Nothing here reads errno or floating-point exceptions.
CXX_FLAGS += ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
# One object of each of SIMD_SOURCES for each. Jump threading makes branches of selects that would vectorize.
SIMD_SOURCES = ("simd.cpp", "simd_optimizers.cpp")
SIMD_FLAGS = ("-fno-thread-jumps",)
SIMD = {"baseline": ()}
if platform.machine() in ("x86_64", "AMD64"):
    SIMD |= {"avx2": ("-march=x86-64-v3",), "avx512": ("-march=x86-64-v4", "-mprefer-vector-width=512")}

SANITIZE_FLAGS = ()
if os.environ.get("AMPCTX_SANITIZE", "0") == "1":
    SANITIZE_FLAGS = ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined,float-cast-overflow")
    SANITIZE_FLAGS += ("-fno-sanitize-recover=all",)


def run(command: list[str]) -> None:
    print("+", *command, flush=True)
    result = subprocess.run(command, capture_output=True, text=True)
    print(result.stdout + result.stderr, end="", flush=True)
    if result.returncode:
        raise CompileError(f"{command[0]} failed:\n{result.stdout}{result.stderr}")


def find_cxx() -> str:
    cxx = os.environ.get("CXX", "g++")
    if not shutil.which(cxx):
        raise CompileError(f"no C++ compiler: {cxx!r} was not found. Install g++ 11 or newer, or set CXX")
    return cxx


def generator() -> ModuleType:
    """csrc/generate.py."""
    spec = importlib.util.spec_from_file_location("ampctx_generate", Path(__file__).parent / CSRC / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Nvcc:
    """The CUDA compiler: where it is, what it can do."""

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
        wanted = os.environ.get("AMPCTX_CUDA", "auto")
        if wanted not in ("auto", "0", "1"):
            raise CompileError(f"AMPCTX_CUDA={wanted!r}: expected auto, 0 or 1")
        if wanted == "0":
            return None
        home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
        places = [f"{home}/bin/nvcc"] if home else ["nvcc", "/usr/local/cuda/bin/nvcc"]
        found = next(filter(None, map(shutil.which, places)), None)
        if found is None and wanted == "1":
            raise CompileError(f"AMPCTX_CUDA=1, but nvcc was not found: tried {' and '.join(places)}. Set CUDA_HOME")
        return cls(found) if found else None

    def _ask(self, option: str) -> str:
        return subprocess.run([self.path, option], check=True, capture_output=True, text=True).stdout

    @property
    def groups(self) -> list[list[str]]:
        """Targets that share one PTX, that of the first: nothing in csrc is for one of them alone, and nvcc 13 writes
        the same for each but for the header, with one compiler below 100 and another from there on. The last target of
        a group is the PTX itself: for later GPUs, and so that `make test-ptx` runs what all code was made from."""
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
    """What tells the sources of one build from those of another, with what is made of the specs."""
    digest = hashlib.sha256(repr(generator().texts()).encode())
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def compile_all(cxx: str, nvcc: Nvcc | None, build: Path) -> list[str]:
    """Compiles what was made of other sources or by another command, in parallel; returns the object files.

    Sources are told apart by content: their times say nothing where a tree was copied or unpacked.
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

    includes = [f"-I{generated}", "-I."]
    cxx_flags = [*CXX_FLAGS, *SANITIZE_FLAGS, *includes]
    jobs = []
    for source in sorted([CSRC / "library.cpp", *(CSRC / "cpu").glob("*.cpp")]):
        if source.name in SIMD_SOURCES:
            jobs += [
                (source, [cxx, *cxx_flags, *SIMD_FLAGS, *SIMD[isa], f"-DAMPCTX_SIMD_NAME={isa}"], isa) for isa in SIMD
            ]
        else:
            jobs.append((source, [cxx, *cxx_flags, *x86, *(info if source.name == "library.cpp" else [])], ""))
    if nvcc:  # these take longest: first, so that no core waits for the last of them
        cuda = sorted([*(CSRC / "cuda").glob("*.cu"), *generated.glob("*.cu")])
        jobs = [(source, [nvcc.path, "-ccbin", cxx, *nvcc.flags(), *includes], "") for source in cuda] + jobs

    def compile_one(job: tuple[Path, list[str], str]) -> str:
        source, command, variant = job
        out = build / f"{source.parent.name}_{source.stem}{variant and '_' + variant}.o"
        record, made_of = out.with_suffix(".made_of"), headers.copy()
        made_of.update(repr((command, nvcc and nvcc.version)).encode() + source.read_bytes())
        if not (out.exists() and record.exists() and record.read_text() == made_of.hexdigest()):
            record.unlink(missing_ok=True)
            run([*command, "-c", str(source), "-o", str(out)])
            record.write_text(made_of.hexdigest())
        return str(out)

    build.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compile_one, jobs))


def link(cxx: str, nvcc: Nvcc | None, objects: list[str], build: Path, out: Path) -> None:
    """Links against an empty libtorch.so; the real one is found by that name in the process that imported torch."""
    (build / "stub.c").write_text("")
    run([cxx, "-shared", "-x", "c", str(build / "stub.c"), "-Wl,-soname,libtorch.so", "-o", str(build / "libtorch.so")])
    out.parent.mkdir(parents=True, exist_ok=True)
    linker = [nvcc.path, "-ccbin", cxx] if nvcc else [cxx]  # nvcc adds its static runtime, and knows where that is
    strip = [] if SANITIZE_FLAGS else ["-s"]
    options = [*strip, "--exclude-libs=ALL", "--no-as-needed", "-ltorch", "--as-needed"]
    flags = [f"-L{build}"] + [word for option in options for word in ("-Xlinker", option)]
    run([*linker, *SANITIZE_FLAGS, "-shared", *objects, "-o", str(out), *flags])


class BuildOps(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"  # no Python tag: the library knows nothing of Python

    def build_extension(self, ext: Extension) -> None:
        if platform.system() != "Linux":
            raise CompileError(f"the kernels of ampctx build on Linux, not on {platform.system()}")
        cxx, nvcc = find_cxx(), Nvcc.find()
        # An editable install is given a new directory each time, and nothing that was compiled before would be found.
        build = Path("build" if self.editable_mode else self.build_temp) / "ops"
        link(cxx, nvcc, compile_all(cxx, nvcc, build), build, Path(self.get_ext_fullpath(ext.name)))


class AnyPythonWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


if __name__ == "__main__":  # not where only source_digest is wanted
    sources = [str(path) for path in sorted(CSRC.rglob("*")) if path.suffix in (".cpp", ".cu", ".h", ".cuh")]
    setup(
        ext_modules=[Extension("ampctx._ops", sources)],
        cmdclass={"build_ext": BuildOps, "bdist_wheel": AnyPythonWheel},
    )
