"""Installs the programs of tests/clients into a folder of their own; run by the Makefile with the python of its .venv.

    .venv/bin/python .ci/clients.py DIRECTORY

DIRECTORY/packages gets the group clients of pyproject.toml, DIRECTORY/transformers-5 the group of that name. pip
installs no dependencies: the lists are complete, and torchvision would pull a torch with CUDA. DIRECTORY/sources gets
the source archive of pytorch-ignite, whose own tests run too.
"""

import shutil
import subprocess
import sys
import tarfile
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "-qq", "--disable-pip-version-check", *arguments]
    if code := subprocess.run(command).returncode:
        sys.exit(code)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    target = Path(sys.argv[1])
    shutil.rmtree(target, ignore_errors=True)
    packages = target / "packages"
    for group, folder in (("clients", packages), ("transformers-5", target / "transformers-5")):
        pip("install", "--no-deps", "--group", f"{ROOT / 'pyproject.toml'}:{group}", "--target", str(folder))
    (ignite,) = distributions(name="pytorch-ignite", path=[str(packages)])
    name, sources = ignite.name, target / "sources"
    pip("download", "--no-deps", "--no-binary", name, "--dest", str(sources), f"{name}=={ignite.version}")
    (archive,) = sources.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(sources, filter="data")
    archive.unlink()


if __name__ == "__main__":
    main()
