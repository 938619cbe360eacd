"""Reports what ``ampctx-apex migrate`` found in each file, as a diff, as lines and as JSON."""

from __future__ import annotations

import dataclasses
import difflib
import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

# moved: the new name is the same object. adapted: works, as the message says. manual: unchanged, needs an edit.
Status = Literal["moved", "adapted", "manual"]


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

    def __str__(self) -> str:
        call = self.name if self.arguments is None else f"{self.name}({', '.join(self.arguments)})"
        message = f": {self.message}" if self.message else ""
        # Joins the lines of a call.
        return f"{self.file}:{self.line}:{self.column}: {self.status}: {' '.join(call.split())}{message}"


@dataclass
class FileResult:
    path: str
    before: bytes = b""
    after: bytes = b""
    findings: list[Finding] = field(default_factory=list)
    error: str | None = None

    @property
    def changed(self) -> bool:
        return self.after != self.before

    def fail(self, reason: str) -> None:
        """Records that the file stays as it is: no findings, which would claim changes."""
        self.error, self.after, self.findings = reason, self.before, []

    def diff(self) -> bytes:
        """A unified diff that ``patch`` and ``git apply`` accept, in the encoding of the file."""
        name = self.path.lstrip("/").encode(errors="surrogateescape")
        before, after = (io.BytesIO(text).readlines() for text in (self.before, self.after))
        lines = difflib.diff_bytes(difflib.unified_diff, before, after, b"a/" + name, b"b/" + name)
        return b"".join(line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n" for line in lines)


def counted(results: Sequence[FileResult]) -> dict[str, int]:
    statuses = Counter(finding.status for result in results for finding in result.findings)
    return {
        "files": len(results),
        "changed": sum(result.changed for result in results),
        **{status: statuses[status] for status in get_args(Status)},
        "errors": sum(result.error is not None for result in results),
    }


def lines(results: Sequence[FileResult], written: bool) -> list[str]:
    """A line for each finding, for each file that failed, and for the sum."""
    out: list[str] = []
    for result in results:
        out += map(str, result.findings)
        out += [f"{result.path}: error: {result.error}"] if result.error is not None else []
    counts = counted(results)
    statuses = ", ".join(f"{counts[status]} {status}" for status in get_args(Status))
    total = f"{_files(counts['files'])} scanned, {counts['changed']} {'changed' if written else 'to change'}."
    total += f" apex names: {statuses}."
    total += f" {_files(counts['errors'])} with errors." if counts["errors"] else ""
    return [*out, total + (" Run with --write to apply." if counts["changed"] and not written else "")]


def _files(count: int) -> str:
    return f"{count} file{'' if count == 1 else 's'}"


def as_json(results: Sequence[FileResult], written: bool) -> dict[str, Any]:
    """``files``, ``findings`` and ``summary`` as plain data."""
    files = [{"file": r.path, "error": r.error, "diff": r.diff().decode(errors="backslashreplace")} for r in results]
    findings = [dataclasses.asdict(finding) for result in results for finding in result.findings]
    return {"written": written, "files": files, "findings": findings, "summary": counted(results)}
