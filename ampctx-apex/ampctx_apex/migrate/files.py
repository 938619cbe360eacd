"""Finds, reads and writes source files. Encoding, newlines, BOM and mode bits stay."""

from __future__ import annotations

import codecs
import errno
import io
import os
import shutil
import tempfile
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_SKIPPED = {"build", "node_modules", "__pycache__"}


@dataclass(frozen=True)
class Text:
    """The text of a Python file, with its encoding and BOM. Newlines stay as in the file."""

    text: str
    encoding: str
    bom: bytes

    def encode(self, text: str) -> bytes:
        return self.bom + text.encode(self.encoding)


def find(paths: Sequence[Path]) -> Iterator[Path]:
    """Yields the files in ``paths``, and ``*.py`` and ``*.ipynb`` below its directories: each once, in order.

    Skips hidden directories, virtual environments, ``build``, ``node_modules``, ``__pycache__`` and links to
    directories.
    """
    seen: set[Path] = set()
    for path in paths:
        for file in _below(path) if path.is_dir() else [path]:
            real = file.resolve()
            if real not in seen:
                seen.add(real)
                yield file


def _below(directory: Path) -> Iterator[Path]:
    for root, directories, files in os.walk(directory):
        directories[:] = sorted(
            d
            for d in directories
            if not d.startswith(".") and d not in _SKIPPED and not Path(root, d, "pyvenv.cfg").exists()
        )
        for name in sorted(files):
            file = Path(root, name)
            # Skips dangling and circular links.
            if file.suffix in (".py", ".ipynb") and file.is_file():
                yield file


def decode(data: bytes) -> Text:
    """Decodes a source file by its declared encoding (PEP 263).

    Raises:
        SyntaxError: the encoding is unknown, or contradicts the byte order mark.
        UnicodeDecodeError: the bytes are not valid in that encoding.
    """
    bom = codecs.BOM_UTF8 if data.startswith(codecs.BOM_UTF8) else b""
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    if bom:
        encoding = "utf-8"
    return Text(data[len(bom) :].decode(encoding), encoding, bom)


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
