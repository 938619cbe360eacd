"""Environments in which ampctx-apex, or an apex of another kind, is installed. Nothing is downloaded."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PIP = [sys.executable, "-m", "pip", "-qq", "--disable-pip-version-check"]
# Another apex: NVIDIA's without its C++ extensions, as it is since May 2025.
OTHER = {
    "pyproject.toml": """
        [build-system]
        requires = ["setuptools"]
        build-backend = "setuptools.build_meta"
        [project]
        name = "apex"
        version = "0.1"
        [tool.setuptools]
        packages = ["apex"]
    """,
    "apex/__init__.py": "KIND = 'other'\n",
    "apex/transformer.py": "",
}


def wheel(source: Path, into: Path) -> Path:
    """Builds the wheel of a source tree."""
    command = [*PIP, "wheel", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", str(into), str(source)]
    environment = {**os.environ, "AMPCTX_KERNELS": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return max(into.glob("*.whl"), key=os.path.getmtime)


def sources(folder: Path) -> Path:
    """A copy of the sources of ampctx-apex."""
    ignored = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    return Path(shutil.copytree(ROOT / "ampctx-apex", folder / "ampctx-apex", ignore=ignored))


def ours(folder: Path) -> Path:
    """The wheel of ampctx-apex."""
    return wheel(sources(folder), folder / "wheels")


def other(folder: Path) -> Path:
    """The wheel of another apex."""
    for name, text in OTHER.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("\n".join(line.strip() for line in text.splitlines()))
    return wheel(folder, folder / "wheels")


class Environment:
    """A virtual environment that sees torch and the other packages of this Python, and the folders in ``path``.

    An editable ampctx of this Python stays hidden: Python reads no .pth file in a folder that another .pth adds.
    """

    def __init__(self, folder: Path, *path: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        self.python = str(folder / "bin" / "python")
        query = "import sysconfig; print(sysconfig.get_path('purelib'))"
        self.site = Path(self.run("-c", query, code=0).strip())
        shared = [*path, sysconfig.get_path("purelib")]
        (self.site / "shared.pth").write_text("".join(f"{entry}\n" for entry in shared))

    def pip(self, *arguments: str | Path) -> None:
        command = [*PIP[:3], "--python", self.python, *PIP[3:], *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    def install(self, *wheels: Path) -> None:
        self.pip("install", "--no-deps", "--no-index", *wheels)

    def run(self, *arguments: str | Path, code: int = 0, cwd: Path | None = None, **variables: str) -> str:
        """What Python prints in this environment; if it fails as ``code`` says, its errors."""
        hidden = ("AMPCTX_APEX", "PYTHONPATH")
        environment = {k: v for k, v in os.environ.items() if k not in hidden} | {"OMP_NUM_THREADS": "1"} | variables
        command = [self.python, "-W", "error", *map(str, arguments)]
        done = subprocess.run(command, env=environment, cwd=cwd or "/", capture_output=True, text=True, timeout=600)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stderr if code else done.stdout
