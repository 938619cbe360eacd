"""Writes the page docs/apex_names.md from the table of ampctx-apex, whenever the site is made. git does not hold it."""

from itertools import groupby
from pathlib import Path

from ampctx_apex.names import NAMES

HEAD = """# Apex names

Every name of `apex` and its extensions that ampctx knows. [Migrate from apex](from_apex.md)
shows how to make them importable; [apex differences](apex_differences.md) describes behaviour.

| Status | Meaning |
| --- | --- |
| supported | works as in apex |
| adapted | works, with the difference in the note |
| refused | imports, and raises `AmpNotImplementedError` on the first call; the note names the replacement |
| refused at import | raises `ImportError`: [why](from_apex.md#modules-that-ampctx-lacks). The note says what to write |
| missing | is not there; the note names the replacement |

Where the fourth column is empty, only the apex name reaches the object: keep it.

| Module or class | Names | Status | In ampctx or torch | Used by | Note |
| --- | --- | --- | --- | --- | --- |
"""


def _rows():
    def row(item):
        name, entry = item
        owner, _, last = name.rpartition(".")
        same = entry.target is not None and entry.target.rpartition(".")[2] == last
        target = entry.target and (f"same name in `{entry.target.rpartition('.')[0]}`" if same else f"`{entry.target}`")
        status = "refused at import" if entry.at_import else entry.status
        return f"`{owner or name}`", status, target or "", entry.used_by, entry.note.replace("|", "\\|")

    for (owner, *rest), items in groupby(sorted(NAMES.items(), key=row), row):
        names = ", ".join(f"`{name.rpartition('.')[2]}`" for name, _ in items)
        yield " | ".join(["", owner, names, *rest, ""]).strip()


def setup(app):
    page, text = Path(__file__).with_suffix(".md"), HEAD + "\n".join(_rows()) + "\n"
    if not page.exists() or page.read_text() != text:
        page.write_text(text)
