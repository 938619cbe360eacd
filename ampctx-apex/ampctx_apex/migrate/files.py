"""Finds and replaces source files. Mode bits stay."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

_SKIPPED = {"build", "node_modules", "__pycache__"}


def find(paths: Sequence[Path]) -> Iterator[Path]:
    """Yields the files in ``paths``, and ``*.py`` and ``*.ipynb`` below its directories: each once, in order.

    Skips hidden directories, virtual environments, ``build``, ``node_modules``, ``__pycache__`` and links to
    directories.
    """
    seen: set[Path] = set()
    for path in paths:
        for file in _below(path) if path.is_dir() else [path]:
            if (real := file.resolve()) not in seen:
                seen.add(real)
                yield file


def _below(directory: Path) -> Iterator[Path]:
    for root, directories, files in os.walk(directory):
        seen = (d for d in directories if not d.startswith(".") and d not in _SKIPPED)
        directories[:] = sorted(d for d in seen if not Path(root, d, "pyvenv.cfg").exists())
        for file in sorted(Path(root, name) for name in files):
            # Skips dangling and circular links.
            if file.suffix in (".py", ".ipynb") and file.is_file():
                yield file


def write(path: Path, data: bytes) -> None:
    """Replaces a file atomically, keeping its mode bits. Writes through symbolic links.

    Raises:
        OSError: nothing was written, and no temporary file is left. Read-only files raise it too, although their
            directory would allow to replace them.
    """
    target = path.resolve()
    if not target.stat().st_mode & 0o222:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(target))
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        shutil.copymode(target, temporary)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
