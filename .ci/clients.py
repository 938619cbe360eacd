"""Installs the programs of tests/clients into a folder of their own; run by the Makefile with the python of its .venv.

    .venv/bin/python .ci/clients.py DIRECTORY

DIRECTORY/packages gets the extra test-clients of pyproject.toml. pip installs no dependencies: the list is complete,
and torchvision would pull a torch with CUDA. DIRECTORY/sources gets source archives: pytorch-ignite's, whose own tests
run too, and fairseq's, of which one file is tested.
"""

import shutil
import subprocess
import sys
import tarfile
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement

EXTRA = "test-clients"
AS_SOURCES = {"pytorch-ignite": "", "fairseq": "==0.12.2"}


def listed() -> list[str]:
    """The requirements of the extra, such as timm==1.0.31."""
    found = [Requirement(line) for line in requires("ampctx") or []]
    return [
        f"{r.name}{r.specifier}"
        for r in found
        if r.marker and r.marker.evaluate({"extra": EXTRA}) and r.name != "ampctx"
    ]


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "-qq", "--disable-pip-version-check", *arguments]
    if code := subprocess.run(command).returncode:
        sys.exit(code)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    target = Path(sys.argv[1])
    shutil.rmtree(target, ignore_errors=True)
    requirements = listed()
    pip("install", "--no-deps", "--target", str(target / "packages"), *requirements)
    for name, version in AS_SOURCES.items():
        source = next((r for r in requirements if r.startswith(name)), name + version)
        pip("download", "--no-deps", "--no-binary", name, "--dest", str(target / "sources"), source)
    for archive in (target / "sources").glob("*.tar.gz"):
        with tarfile.open(archive) as opened:
            opened.extractall(target / "sources", filter="data")
        archive.unlink()


if __name__ == "__main__":
    main()
