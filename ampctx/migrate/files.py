"""Which files there are to look at, and reading and writing them without changing more than was asked for."""

from __future__ import annotations

import codecs
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
    """The text of a Python file, and what it takes to write it back: newlines are left as they are."""

    text: str
    encoding: str
    bom: bytes

    def encode(self, text: str) -> bytes:
        return self.bom + text.encode(self.encoding)


def find(paths: Sequence[Path]) -> Iterator[Path]:
    """The files among ``paths`` and the ``*.py`` and ``*.ipynb`` below the directories, each once, in order.

    Hidden directories, virtual environments, ``build``, ``node_modules`` and ``__pycache__`` are left out below a
    directory, and links to directories are not followed.
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
            # A link that leads nowhere, or to itself, is no file.
            if file.suffix in (".py", ".ipynb") and file.is_file():
                yield file


def decode(data: bytes) -> Text:
    """The text of a file in the encoding that it declares (PEP 263).

    Raises:
        SyntaxError: the encoding is unknown, or contradicts the byte order mark.
        UnicodeDecodeError: the bytes are no text in it.
    """
    bom = codecs.BOM_UTF8 if data.startswith(codecs.BOM_UTF8) else b""
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    if bom:
        encoding = "utf-8"
    return Text(data[len(bom) :].decode(encoding), encoding, bom)


def write(path: Path, data: bytes) -> None:
    """Replaces the content of a file in one step, mode bits kept. A link goes on leading to the file behind it."""
    target = path.resolve()
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
