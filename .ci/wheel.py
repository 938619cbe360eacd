"""Installs the wheels in DIRECTORY into an environment without a compiler. Runs demos and the tests of the ops.

    .venv/bin/python .ci/wheel.py DIRECTORY          run by make test-wheel, after make wheel

The environment sees the packages of the python that runs this script, torch among them, but not the checkout.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEWEST_GLIBC = 28  # torch's own wheels are manylinux_2_28
WHERE = "import ampctx; print(ampctx.__file__); assert ampctx.ops.extension.loaded, ampctx.ops.extension.reason"


def main() -> None:
    wheels = sorted(Path(sys.argv[1]).glob("*.whl")) if len(sys.argv) == 2 else []
    if [wheel.name.partition("-")[0] for wheel in wheels] != ["ampctx", "ampctx_apex"]:
        found = [wheel.name for wheel in wheels]
        sys.exit(f"{__doc__}\nDIRECTORY must hold one wheel of ampctx and one of ampctx-apex, found {found}")
    tag = wheels[0].name
    glibc = min(map(int, re.findall(r"manylinux_2_(\d+)", tag)), default=None)
    if "-cp310-abi3-" not in tag or glibc is None or glibc > NEWEST_GLIBC:
        sys.exit(f"{tag}: expected cp310-abi3 and manylinux_2_{NEWEST_GLIBC} or older; auditwheel show tells why")
    with tempfile.TemporaryDirectory() as folder:
        environment = Path(folder) / "environment"
        venv.create(environment, with_pip=True)
        python = str(environment / "bin" / "python")
        # Python reads no .pth file in a directory that another .pth adds, so an editable ampctx there stays hidden.
        purelib = subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            check=True, capture_output=True, text=True,
        ).stdout.strip()  # fmt: skip
        (Path(purelib) / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
        pip = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps", "--force-reinstall"]
        subprocess.run([*pip, *(str(wheel.resolve()) for wheel in wheels)], check=True)
        for name in ("tests", "examples", "pyproject.toml"):
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, Path(folder) / name)
        # Hide every compiler, on PATH and in variables.
        variables = {key: value for key, value in os.environ.items() if key not in ("CXX", "CUDA_HOME", "PYTHONPATH")}
        variables |= {"PATH": str(environment / "bin"), "AMPCTX_REQUIRE_EXTENSION": "1", "OMP_NUM_THREADS": "1"}
        # Emulated backends would need a compiler.
        tests = [
            "-m",
            "pytest",
            "-q",
            "-n",
            "auto",
            "tests/ops",
            "tests/optimizers",
            "-k",
            "(cpu or reference) and not emulated",
        ]
        demos = [["examples/digits.py", "--epochs", "2"], ["examples/apex_digits.py", "--epochs", "2"]]
        for command in (["-c", WHERE], ["-m", "ampctx"], *demos, tests):
            subprocess.run([python, *command], cwd=folder, env=variables, check=True)


if __name__ == "__main__":
    main()
