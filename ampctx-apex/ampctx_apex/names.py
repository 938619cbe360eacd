"""Reads names.toml, the table of apex's names."""

from __future__ import annotations

import importlib
import itertools
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ampctx_apex.roots import MODULES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class Name(NamedTuple):
    """One apex name.

    ``status``: "supported" works as in apex; "adapted" differs as ``note`` says; "refused" raises, and ``note`` names
    the replacement; "missing" is not there, unless an installed apex has it. ``target``: its name in ampctx or torch,
    where that is the same object. ``at_import``: it raises at the import, not at the call. ``used_by``: programs.
    """

    status: Literal["supported", "adapted", "refused", "missing"]
    target: str = ""
    note: str = ""
    at_import: bool = False
    used_by: str = ""

    @property
    def is_served(self) -> bool:
        return self.status in ("supported", "adapted")


def _expanded(names: str) -> Iterator[str]:
    """The words of ``names``; of a word with {a,b} one for each choice."""
    for word in names.split():
        yield from map("".join, itertools.product(*(part.split(",") for part in re.split(r"[{}]", word))))


def _file(module: str) -> Path | None:
    path = Path(MODULES, *module.split("."))
    return next((f for f in (path.with_suffix(".py"), path / "__init__.py") if f.exists()), None)


def public(module: str) -> list[str]:
    """``__all__`` of a module in ``modules/``, or its functions, classes and what it imports of apex's own modules.

    It is not imported for that. A package may go by the names of submodules, too.
    """
    if (file := _file(module)) is None:
        return public(module.rpartition(".")[0])
    text = file.read_text()
    if lists := re.findall(r"^\s*__all__ \+?= \[(.*?)\]", text, flags=re.M | re.S):
        return re.findall(r'"(\w+)"', "".join(lists))
    own = re.findall(r"^(?:class|def) ([A-Za-z]\w*)", text, flags=re.M)
    imported = re.findall(r"^ *from \.[.\w]* import (\([^)]*|.*)", text, flags=re.M)
    return [*own, *re.findall(r"\b[A-Za-z]\w*", " ".join(imported) if file.stem == "__init__" else "")]


def _served(row: Mapping[str, Any]) -> Iterator[tuple[str, Name]]:
    plain = Name("supported", note=row.get("note", ""), used_by=row["used_by"])
    same = [(owner, word) for owner, words in row.get("same", {}).items() for word in words.split()]
    target = {word.partition(">")[0]: f"{owner}.{word.rpartition('>')[2]}" for owner, word in same}
    adapted = {name: note for names, note in row.get("adapted", {}).items() for name in names.split()}
    for module in _expanded(row["of"]):
        if "names" not in row:
            yield module, plain
        for name in row["names"].split() if "names" in row else dict.fromkeys([*public(module), *target]):
            entry = plain._replace(target=target.get(name, ""), note=row.get("notes", {}).get(name, plain.note))
            yield f"{module}.{name}", entry._replace(status="adapted", note=adapted[name]) if name in adapted else entry


def _read() -> Iterator[tuple[str, Name]]:
    for row in TABLE["served"]:
        yield from _served(row)
    beside = " If an NVIDIA apex with this module is installed too, the module comes from there."
    at_import = Name("refused", at_import=True)
    for kind, entry in {"refused": Name("refused"), "refused_at_import": at_import, "missing": Name("missing")}.items():
        for names, text in TABLE[kind].items():
            note = f"Use {text}.{beside if entry.at_import else ''}"
            yield from ((name, entry._replace(note=note)) for name in _expanded(names))


TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
NAMES: Mapping[str, Name] = dict(_read())
# Modules without a file: further names of the package that they are in.
ALIASES = [m for row in TABLE["served"] if "names" not in row for m in _expanded(row["of"]) if _file(m) is None]


def is_same(name: str) -> bool:
    """Whether ``name`` is an object of ampctx or torch."""
    return name in NAMES and NAMES[name].target != ""


def same(name: str) -> Any:
    """The object of that name."""
    module, _, attribute = NAMES[name].target.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def lookup(name: str) -> Name | None:
    """The entry of ``name``, or of what contains it and is not served."""
    entry = NAMES.get(name)
    while entry is None and (name := name.rpartition(".")[0]):
        entry = above if (above := NAMES.get(name)) is not None and not above.is_served else None
    return entry


def refusal(name: str) -> str | None:
    """The error text for a call of ``name``; None unless it is refused."""
    if (entry := lookup(name)) is None or entry.status != "refused":
        return None
    return f"{name} is not supported by ampctx. {entry.note}"


def is_refused_at_import(name: str) -> bool:
    """Whether the import of ``name`` raises. False unless it is refused."""
    return (entry := lookup(name)) is not None and entry.at_import
