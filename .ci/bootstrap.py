"""Makes a virtual environment that can run ampctx; stdlib only, run by the Makefile.

    python3 .ci/bootstrap.py VENV REQUIREMENT        e.g.  .venv torch==2.13.0

Keeps a torch of 2.11 or newer: the one in VENV, or that of the python that runs this script, which VENV then sees.
Otherwise it installs REQUIREMENT; without an NVIDIA driver its CPU build, and never the CUDA packages.
"""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

OLDEST = (2, 11)
PROBE = f"import torch, sys; sys.exit(tuple(int(n) for n in torch.__version__.split('+')[0].split('.')[:2]) < {OLDEST})"


def serves(python: str) -> bool:
    """Whether this python can import a new enough torch."""
    return subprocess.run([python, "-c", PROBE], stderr=subprocess.DEVNULL).returncode == 0


def has_gpu() -> bool:
    return os.path.exists("/proc/driver/nvidia/version") or os.path.exists("/dev/nvidia0")


def pulls_cuda(python: str, requirement: str) -> bool:
    """Whether the configured package source would install CUDA packages with torch. Installs nothing."""
    command = [python, "-m", "pip", "install", "--quiet", "--dry-run", "--report", "-", requirement]
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    names = [item["metadata"]["name"].lower() for item in report["install"]]
    return any(name.startswith(("nvidia-", "cuda-")) for name in names)


def install_torch(python: str, requirement: str) -> None:
    if has_gpu() or not pulls_cuda(python, requirement):
        # Not quiet: the download takes minutes, and pip's progress bar shows that it goes on.
        subprocess.run([python, "-m", "pip", "install", "--disable-pip-version-check", requirement], check=True)
        return
    # uv knows where torch keeps its CPU builds.
    print(f"no NVIDIA driver here: installing the CPU build of {requirement}")
    subprocess.run([python, "-m", "pip", "install", "--quiet", "uv"], check=True)
    uv = [python, "-m", "uv", "pip", "install", "--python", python, "--torch-backend=cpu", requirement]
    if subprocess.run(uv).returncode:
        sys.exit(
            f"make: the CPU build of {requirement} could not be installed. Install any torch >= 2.11 for {python} "
            "(pytorch.org shows the command), then run make again."
        )


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    if sys.version_info < (3, 10):  # noqa: UP036 - this script reports an older python
        sys.exit(
            f"ampctx needs Python 3.10 or newer, and this is {sys.version.split()[0]}. Run make with a newer one, for "
            "example PYTHON=python3.12."
        )
    target, requirement = Path(sys.argv[1]), sys.argv[2]
    python = str(target.absolute() / "bin" / "python")
    if not os.path.exists(python):
        share = serves(sys.executable)
        print(f"creating {target}" + (f", with the torch of {sys.executable}" if share else ""))
        venv.create(target, with_pip=True, system_site_packages=share)
    if not serves(python):
        print(f"installing {requirement}")
        install_torch(python, requirement)
    if not serves(python):
        sys.exit(
            f"make: {requirement} is installed in {target}, but `import torch` fails there or is older than 2.11. "
            f"Delete {target} and run make again."
        )


if __name__ == "__main__":
    main()
