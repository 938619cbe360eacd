"""The table of names in docs/from_apex.md, from ``names.py``.

python -m ampctx.compat.table docs/from_apex.md    # writes it anew, between its two marks
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from ampctx.compat.names import NAMES, Name

BEGIN = "<!-- the table: python -m ampctx.compat.table docs/from_apex.md -->"
END = "<!-- end of the table -->"


def _owner(name: str) -> str:
    return name.rpartition(".")[0] or name


def _target(name: str, entry: Name) -> str:
    """Where the name is, in a form that several names of one owner can have in common."""
    if entry.target is None:
        return ""
    owner, _, last = entry.target.rpartition(".")
    return f"the same in `{owner}`" if last == name.rpartition(".")[2] else f"`{entry.target}`"


def _rows() -> Iterator[str]:
    entries = [(_owner(name), name.rpartition(".")[2], entry, _target(name, entry)) for name, entry in NAMES.items()]
    entries.sort(key=lambda e: (e[0], e[2].status, e[3], e[2].note, e[1].lower()))
    owner_shown = None
    for (owner, status, target, note), group in groupby(entries, lambda e: (e[0], e[2].status, e[3], e[2].note)):
        names = ", ".join(f"`{last}`" for _, last, _, _ in group)
        shown = "" if owner == owner_shown else f"`{owner}`"
        owner_shown = owner
        cells = (shown, names, status, target, note.replace("|", "\\|"))
        yield "| " + " | ".join(cells) + " |"


def markdown() -> str:
    """Marks and table."""
    head = ["| in | names | status | elsewhere | note |", "| --- | --- | --- | --- | --- |"]
    return "\n".join([BEGIN, "", *head, *_rows(), "", END])


def replaced(page: str) -> str:
    """``page`` with the table between the marks as it should be.

    Raises:
        ValueError: the page lacks one of the marks.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page lacks {BEGIN!r} or {END!r}")
    return before + markdown() + after


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(replaced(path.read_text()))
