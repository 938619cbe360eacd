"""Runs the tests of the ops and optimizers on the PTX inside the built extension, executed on the CPU: `make test-ptx`.

    python tests/ptx/run.py [--extension FILE] [--generations 75,100] [arguments for pytest]

What nvcc has made of every kernel runs with its real 256 threads a block, and each launch and access is checked: see
README.md beside this file. At the end stands which entries of the library no test has launched: none, or it fails.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from library import EXTENSION, FOLDER, ROOT, build, extract, functions
from translate import Module, PtxError, write_program

PACKAGE = FOLDER / "package"
# What runs in one process, with the options of pytest.
SUITES = {
    # Through torch.ops.ampctx_emulated. 8,000 tensors or more are further launches of what fewer launch.
    "ops": ["tests/ops", "-k", "emulated and not shuffled and not 256 and not 8k and not 20k"],
    # Through torch.ops.ampctx, which the interpreter serves in place of the CPU kernels.
    "optimizers": [
        "tests/optimizers",
        "tests/integration/test_capture.py",
        "tests/test_grad_clip.py",
        "tests/test_foreach.py",
        "tests/apex/test_multi_tensor_apply.py",
        "tests/apex/test_amp_C.py",
        "tests/apex/test_amp_C_steps.py",
        # Offloaded and split weights are stepped on a CPU, by the ops of the other files.
        "-k",
        "not fp64 and not float64 and not test_offload and not test_split_masters",
    ],
    "exercise": ["tests/ptx/test_exercise.py", "tests/ptx/test_order_of_loads.py"],
    # The interpreter's own checks, and what run.py refuses: the same for every target, run on the first alone.
    "interpreter": ["tests/ptx/test_planted_faults.py", "tests/ptx/test_libraries.py"],
}
LEFT_OUT = (
    # CUDA kernels have no fp64, which stands in the lists of these.
    "tests/optimizers/test_optimizer_scaling.py::test_state_from_before_initialize_stays_in_fp32",
    "tests/test_foreach.py::test_l2norm_over_a_mix",
    "tests/test_foreach.py::test_norms_of_each_over_a_mix_are_in_the_order_of_the_list",
    "tests/test_foreach.py::test_one_bad_element_anywhere_raises_the_flag",
    "tests/test_foreach.py::test_scale_and_axpby_over_a_mix",
    "tests/test_grad_clip.py::test_mixed_dtypes_layouts_and_missing_gradients",
    "tests/test_grad_clip.py::test_norm_and_gradients_are_torchs[dtype1",
    # Averages over a million draws, which the emulation makes.
    "tests/ops/test_state_types.py::test_rounding_is_right_on_average",
)


@dataclass
class Generation:
    """The PTX of one target, encoded, and what the tests have executed of it."""

    extension: Path
    target: str
    modules: list[Module]
    program: Path
    coverage: Path
    sizes: dict[str, int] = field(default_factory=dict)

    def encode(self, library: Path) -> None:
        """Writes the program, and loads it once: an opcode that is not known ends the run."""
        self.sizes = write_program(self.modules, functions(library), self.program)
        load = ctypes.CDLL(str(library)).ampctx_ptx_load
        load.restype = ctypes.c_char_p
        if error := load(str(self.program).encode(), None).decode():
            raise PtxError(error)
        self.coverage.write_bytes(bytes(8 * len(self.sizes) + sum(self.sizes.values())))

    def report(self) -> list[str]:
        """Prints what ran; returns the entries that never did."""
        counted = self.coverage.read_bytes()
        launches = memoryview(counted[: 8 * len(self.sizes)]).cast("Q")
        executed = sum(counted[8 * len(self.sizes) :])
        total = sum(self.sizes.values())
        never = [name for name, count in zip(self.sizes, launches, strict=True) if not count]
        print(
            f"{self.target}: {len(self.sizes) - len(never)} of {len(self.sizes)} entries launched, "
            f"{sum(launches)} launches, {executed} of {total} instructions executed ({executed / total:.1%})"
        )
        for name in never:
            print(f"{self.target}: never launched: {name}")
        return never


def same_but_for_header(a: list[Module], b: list[Module]) -> bool:
    """Whether two targets have the same entries with the same statements."""

    def content(modules: list[Module]) -> dict:
        return {
            (name, function.head): [statement.text for statement in function.body]
            for module in modules
            for name, function in module.functions.items()
        }

    return content(a) == content(b)


def different(found: dict[str, list[Module]]) -> dict[str, list[Module]]:
    """Of targets with the same code, the first; says which these are."""
    kept: dict[str, list[Module]] = {}
    for target, modules in found.items():
        twin = next((other for other in kept if same_but_for_header(kept[other], modules)), None)
        if twin:
            print(f"{target}: the same as {twin} in every statement, but for the header: not run again")
        else:
            kept[target] = modules
    return kept


def make_package(library: Path) -> None:
    """An ampctx that is the checkout's but for the library."""
    inside = PACKAGE / "ampctx"
    inside.mkdir(parents=True, exist_ok=True)
    for path in inside.iterdir():
        path.unlink()
    for path in (ROOT / "ampctx").iterdir():
        if path.name not in ("_ops.so", "__pycache__"):
            (inside / path.name).symlink_to(path)
    (inside / "_ops.so").symlink_to(library)


def run_suite(generation: Generation, name: str, library: Path, arguments: list[str]) -> tuple[str, int, str, float]:
    """What ran, pytest's exit code and output, and the seconds."""
    start = time.monotonic()
    # The script, which unlike `python -m pytest` does not put this folder's ampctx first.
    command = [str(Path(sys.executable).with_name("pytest")), "-q", "--full", "-p", "no:cacheprovider", "-n", "0"]
    command += [*SUITES[name], *(f"--deselect={test}" for test in LEFT_OUT), *arguments]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "AMPCTX_PLAN": "0",  # so that each tensor goes through torch's dispatcher, where hooks.cpp sees it
        "AMPCTX_REQUIRE_EXTENSION": "1",
        "AMPCTX_EMULATION_LIBRARY": str(library),
        "AMPCTX_PTX_PROGRAM": str(generation.program),
        "AMPCTX_PTX_COVERAGE": str(generation.coverage),
        "AMPCTX_PTX_EXTENSION": str(generation.extension.resolve()),
        "AMPCTX_PTX_TARGET": generation.target,
        "PYTHONPATH": os.pathsep.join([str(PACKAGE), os.environ.get("PYTHONPATH", "")]),
    }
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    return f"{generation.target} {name}", result.returncode, result.stdout + result.stderr, time.monotonic() - start


def run_tests(generations: list[Generation], library: Path, arguments: list[str]) -> bool:
    """All suites for each generation, as many at once as there are cores. Prints those that failed in full."""
    passed = True
    wanted = [("interpreter", generations[0])]
    wanted += [(name, generation) for name in ("optimizers", "ops", "exercise") for generation in generations]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [pool.submit(run_suite, generation, name, library, arguments) for name, generation in wanted]
        for job in jobs:
            name, code, output, seconds = job.result()
            passed = passed and code == 0
            print(output if code else output.strip().splitlines()[-1])
            print(f"{name}: {'passed' if code == 0 else f'failed, exit code {code}'}, {seconds:.0f} s", flush=True)
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extension", type=Path, default=EXTENSION, help="the library; default ampctx/_ops.so")
    parser.add_argument("--generations", help="targets, such as 75,100; default: all that differ")
    arguments, rest = parser.parse_known_args()
    if b'"cuda": null' in arguments.extension.read_bytes():
        print("test-ptx: skipped, as PTX comes out of a build with CUDA kernels, and this one has none")
        return 0
    try:
        found = different(extract(arguments.extension))
        if arguments.generations:
            wanted = [f"sm_{number}" for number in arguments.generations.split(",")]
            if unknown := set(wanted) - set(found):
                raise PtxError(f"--generations: the library has {', '.join(found)}, not {', '.join(sorted(unknown))}")
            found = {target: found[target] for target in wanted}
        library = build()
        make_package(library)
        generations = []
        for target, modules in found.items():
            generation = Generation(
                arguments.extension, target, modules, FOLDER / f"{target}.program", FOLDER / f"{target}.coverage"
            )
            generation.encode(library)
            generations.append(generation)
    except PtxError as error:
        print(f"test-ptx: {error}", file=sys.stderr)
        return 2
    print(f"PTX of {arguments.extension.name} under torch {torch.__version__}: {', '.join(found)}", flush=True)
    passed = run_tests(generations, library, rest)
    never = [name for generation in generations for name in generation.report()]
    return int(not passed or (bool(never) and not rest))


if __name__ == "__main__":
    sys.exit(main())
