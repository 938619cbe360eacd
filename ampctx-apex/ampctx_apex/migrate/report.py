"""Findings, and how ``ampctx migrate`` prints them: diff, text report, JSON."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

# As in the JSON, which scripts read. The text report prints the words of _SHOWN.
Status = Literal["served", "adapted", "person"]
_SHOWN: dict[Status, str] = {"served": "moved", "adapted": "adapted", "person": "manual"}

_NEWLINE = re.compile(r"\r\n?|\n")
_LINKS = [
    ("apex.optimizers", "docs/apex_differences.md#optimizers"),
    ("apex.parallel.LARC", "docs/apex_differences.md#optimizers"),
    ("apex.amp", "docs/apex_differences.md#training-loop"),
    ("", "docs/apex_names.md"),
]


def link(name: str) -> str:
    """The documentation page, and its section, for an apex name."""
    return next(target for prefix, target in _LINKS if name.startswith(prefix))


@dataclass(frozen=True)
class Finding:
    """One use of an apex name.

    ``line`` and ``column`` count from 1. ``arguments``: the source of each argument; None if the name is not called.
    """

    file: str
    line: int
    column: int
    name: str
    arguments: tuple[str, ...] | None
    status: Status
    message: str
    link: str


@dataclass(frozen=True)
class Edit:
    """``text[start:end]`` becomes ``new``."""

    start: int
    end: int
    new: str


@dataclass
class FileResult:
    path: str
    before: str = ""
    after: str = ""
    edits: list[Edit] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    error: str | None = None

    @property
    def changed(self) -> bool:
        return self.after != self.before

    def fail(self, reason: str) -> None:
        """Records that the file stays as it is: no edits, and no findings, which would claim them."""
        self.error, self.after, self.edits, self.findings = reason, self.before, [], []


def line_starts(text: str) -> list[int]:
    return [0, *(match.end() for match in _NEWLINE.finditer(text))]


def apply(text: str, edits: Sequence[Edit]) -> str:
    """Returns ``text`` with all edits applied. They must not overlap; edits at one offset keep their order."""
    parts, end = [], 0
    for edit in sorted(edits, key=lambda e: (e.start, e.end)):
        assert edit.start >= end, f"edits overlap at {edit.start}"
        parts += [text[end : edit.start], edit.new]
        end = edit.end
    return "".join([*parts, text[end:]])


def diff(result: FileResult) -> str:
    """A unified diff that ``patch`` and ``git apply`` accept."""

    def lines(text: str) -> list[str]:
        starts = line_starts(text)
        return [part for a, b in zip(starts, [*starts[1:], len(text)], strict=True) if (part := text[a:b])]

    name = result.path.lstrip("/")
    out = difflib.unified_diff(lines(result.before), lines(result.after), f"a/{name}", f"b/{name}")
    return "".join(line if line.endswith(("\n", "\r")) else f"{line}\n\\ No newline at end of file\n" for line in out)


def summary(results: Sequence[FileResult], written: bool) -> str:
    counts = counted(results)
    statuses = ", ".join(f"{counts[status]} {shown}" for status, shown in _SHOWN.items())
    parts = [f"{_files(counts['files'])} scanned, {counts['changed']} {'changed' if written else 'to change'}."]
    parts.append(f"apex names: {statuses}.")
    if counts["errors"]:
        parts.append(f"{_files(counts['errors'])} with errors.")
    if counts["changed"] and not written:
        parts.append("Run with --write to apply.")
    return " ".join(parts)


def _files(count: int) -> str:
    return f"{count} file{'' if count == 1 else 's'}"


def counted(results: Sequence[FileResult]) -> dict[str, int]:
    statuses = Counter(finding.status for result in results for finding in result.findings)
    return {
        "files": len(results),
        "changed": sum(result.changed for result in results),
        **{status: statuses[status] for status in _SHOWN},
        "errors": sum(result.error is not None for result in results),
    }


def words(results: Sequence[FileResult], written: bool) -> str:
    """The text report: a line per finding, a line per file that failed, and the summary."""
    out = []
    for result in results:
        for f in result.findings:
            call = f.name if f.arguments is None else f"{f.name}({', '.join(f.arguments)})"
            # Joins the lines of a call.
            out.append(f"{f.file}:{f.line}:{f.column}: {_SHOWN[f.status]}: {' '.join(call.split())}")
            if f.message:
                out.append(f"    {f.message}" + (f" ({f.link})" if f.status == "person" else ""))
        if result.error is not None:
            out.append(f"{result.path}: error: {result.error}")
    return "\n".join([*out, summary(results, written)])


def as_json(results: Sequence[FileResult], to: str, written: bool) -> dict[str, Any]:
    """``files``, ``edits``, ``findings`` and ``summary`` as plain data. Lines and columns count from 1."""
    files, edits = [], []
    for result in results:
        status = "error" if result.error is not None else "changed" if result.changed else "unchanged"
        files.append({"file": result.path, "status": status, "error": result.error})
        starts = line_starts(result.before)
        for edit in sorted(result.edits, key=lambda e: (e.start, e.end)):
            line = sum(start <= edit.start for start in starts)
            edits.append(
                {
                    "file": result.path,
                    "line": line,
                    "column": edit.start - starts[line - 1] + 1,
                    "removed": result.before[edit.start : edit.end],
                    "inserted": edit.new,
                }
            )
    findings = [dataclasses.asdict(finding) for result in results for finding in result.findings]
    return {
        "to": to,
        "written": written,
        "files": files,
        "edits": edits,
        "findings": findings,
        "summary": counted(results),
    }
