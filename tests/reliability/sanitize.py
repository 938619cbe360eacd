"""The C++ code under AddressSanitizer and UBSan: builds it anew, runs the tests of the ops and a minute of the fuzzer.

    python tests/reliability/sanitize.py [--csv FILE] [arguments for pytest]

The library goes to build/sanitize and never over the installed one; the emulated CUDA kernels are built with the
sanitizers too. Both sanitizers end the process at the first report, and so the run fails. Before, the script makes sure
that they would: by a call that reads behind the end of a tensor.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import figures

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "sanitize"
LIBRARY = BUILD / "lib"
# All ops on all backends, without what takes minutes even without sanitizers, and what tests the build or the fakes.
TESTS = ["tests/ops", "tests/reliability/test_odd_tensors.py", "tests/optimizers/test_optimizer_plan.py"]
LEFT_OUT = (
    "not 20k and not many and not test_cuda_kernels and not test_simd and not test_torch_abi and not seconds "
    "and not out_of_memory"  # AddressSanitizer ends a process whose allocations fail
)

BEYOND_THE_END = """
import numpy, torch
import ampctx
from ampctx.kernels import ops
assert ampctx.__file__.startswith({folder!r}), ampctx.__file__
assert ops.extension.loaded
claims_more = torch.from_numpy(numpy.lib.stride_tricks.as_strided(numpy.ones(90, dtype=numpy.float32), (100,)))
flag = torch.zeros(())
ops.multi_tensor_scale([claims_more[:90]], [torch.ones(90)], flag, 2.0)
print("the valid call is done", flush=True)
ops.multi_tensor_scale([claims_more], [torch.ones(100)], flag, 2.0)
"""


def runtime(name: str) -> str:
    command = [os.environ.get("CXX", "g++"), f"-print-file-name={name}"]
    path = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    if not Path(path).is_absolute():
        sys.exit(f"this compiler comes without {name}: install the sanitizers of g++")
    return path


def build() -> None:
    command = [sys.executable, "setup.py", "-q", "build", "--build-base", str(BUILD), "--build-lib", str(LIBRARY)]
    environment = {**os.environ, "AMPCTX_SANITIZE": "1", "AMPCTX_CUDA": "0"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"the build failed:\n{result.stdout}{result.stderr}")


def environment() -> dict[str, str]:
    # libstdc++ too, or AddressSanitizer does not find what throws the kernels' errors.
    preload = f"{runtime('libasan.so')} {runtime('libstdc++.so.6')}"
    return {
        **os.environ,
        "LD_PRELOAD": preload,
        "PYTHONPATH": str(LIBRARY),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",  # Python and torch leave much behind at the end
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "OMP_NUM_THREADS": "2",
        "AMPCTX_REQUIRE_EXTENSION": "cpu",
        "AMPCTX_EMULATION_SANITIZE": "1",
        "AMPCTX_HYPOTHESIS_EXAMPLES": "10",
    }


def check_that_it_would_report(env: dict[str, str]) -> None:
    code = BEYOND_THE_END.format(folder=str(LIBRARY))
    result = subprocess.run([sys.executable, "-c", code], cwd=BUILD, env=env, capture_output=True, text=True)
    if "the valid call is done" not in result.stdout or "ERROR: AddressSanitizer" not in result.stderr:
        sys.exit(f"the sanitizers do not work here:\n{result.stdout}{result.stderr}")


def counts(junit: Path) -> dict[str, int]:
    suite = ElementTree.parse(junit).getroot().find("testsuite")
    assert suite is not None
    found = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    return {"passed": found["tests"] - found["failures"] - found["errors"] - found["skipped"], **found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, metavar="FILE", help="put the counts of a run without a report there")
    options, rest = parser.parse_known_args()
    build()
    env = environment()
    check_that_it_would_report(env)
    tested, fuzzed = BUILD / "tests.xml", BUILD / "fuzz.csv"
    command = [sys.executable, "-m", "pytest", "-q", "--full", "-p", "no:cacheprovider", "-k", LEFT_OUT]
    command += ["--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml"), f"--junitxml={tested}"]
    command.append("--capture=sys")  # a report is written to the file descriptor, by a process that then ends
    given = [str(ROOT / a) if (ROOT / a.partition("::")[0]).exists() else a for a in rest or TESTS]
    fuzz = [sys.executable, str(ROOT / "tests" / "reliability" / "fuzz_ops.py"), "--seconds", "60"]
    fuzz += ["--csv", str(fuzzed)]
    # From a folder without an ampctx of its own, which would come before PYTHONPATH.
    failed = [run for run in ([*command, *given], fuzz) if subprocess.run(run, cwd=BUILD, env=env).returncode]
    print("FAILED, see above" if failed else "no report by AddressSanitizer or UBSan")
    if options.csv is not None and not failed:
        calls = int(figures.measuring.read(fuzzed)["fuzz-cpu/all/fuzz/calls"].value)
        found = {f"tests/{name}": count for name, count in counts(tested).items()}
        figures.write(options.csv, "sanitize-cpu", {"tests/reports": 0, **found, "fuzz/calls": calls})
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
