"""Generates the table in docs/apex_names.md from ``names.py``.

python -m ampctx.compat.table docs/apex_names.md    # rewrites the table between its two marks
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from ampctx.compat.names import NAMES, Name

BEGIN = "<!-- the table: python -m ampctx.compat.table docs/apex_names.md -->"
END = "<!-- end of the table -->"


def _owner(name: str) -> str:
    return name.rpartition(".")[0] or name


def _target(name: str, entry: Name) -> str:
    """The target in a form that neighbouring rows can share, so that they become one row."""
    if entry.target is None:
        return ""
    owner, _, last = entry.target.rpartition(".")
    return f"same name in `{owner}`" if last == name.rpartition(".")[2] else f"`{entry.target}`"


def _status(entry: Name) -> str:
    return f"{entry.status} at import" if entry.at_import else entry.status


def _rows() -> Iterator[str]:
    entries = [(_owner(name), name.rpartition(".")[2], entry, _target(name, entry)) for name, entry in NAMES.items()]
    entries.sort(key=lambda e: (e[0], _status(e[2]), e[3], e[2].note, e[1].lower()))
    owner_shown = None
    for (owner, status, target, note), group in groupby(entries, lambda e: (e[0], _status(e[2]), e[3], e[2].note)):
        names = ", ".join(f"`{last}`" for _, last, _, _ in group)
        shown = "" if owner == owner_shown else f"`{owner}`"
        owner_shown = owner
        cells = (shown, names, status, target, note.replace("|", "\\|"))
        yield "| " + " | ".join(cells) + " |"


def markdown() -> str:
    """The table between its marks."""
    head = ["| Module or class | Names | Status | In ampctx or torch | Note |", "| --- | --- | --- | --- | --- |"]
    return "\n".join([BEGIN, "", *head, *_rows(), "", END])


def replaced(page: str) -> str:
    """Returns ``page`` with a fresh table between its marks.

    Raises:
        ValueError: ``page`` lacks a mark.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page lacks {BEGIN!r} or {END!r}")
    return before + markdown() + after


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(replaced(path.read_text()))
