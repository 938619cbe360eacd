"""``ampctx migrate``: its command line, and the loop over files."""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ampctx_apex.migrate import files, report
from ampctx_apex.migrate.report import FileResult, Finding

if TYPE_CHECKING:
    from ampctx_apex.migrate.analysis import Parsed

EPILOG = """\
exit codes:
  0  nothing needs manual work; with --check: nothing to change either
  1  an apex name needs manual work; with --check: or a file would change
  2  wrong usage, or a file that could not be read, parsed or written; the
     other files are still processed
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = "Rewrite apex imports to ampctx. Prints a diff; --write applies it."
    parser.epilog = EPILOG
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="a file, or a directory to search for *.py")
    parser.add_argument(
        "--to", choices=["ampctx", "torch"], default="ampctx", help="torch: rewrite O1 loops to torch.amp"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--write", action="store_true", help="apply the changes; each file is replaced atomically")
    mode.add_argument(
        "--check",
        action="store_true",
        help="print no diff; exit with 1 if a file would change or a name needs manual work",
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the command and returns its exit code."""
    try:
        import libcst  # noqa: F401
    except ImportError as error:
        print(f"ampctx migrate: needs libcst ({error}). Install it: pip install libcst", file=sys.stderr)
        return 2
    results = migrate(arguments.paths, arguments.to)
    if arguments.write:
        for result in results:
            _write(result)
    if arguments.json:
        print(json.dumps(report.as_json(results, arguments.to, arguments.write), indent=2))
    else:
        if not arguments.write and not arguments.check:
            print("".join(report.diff(result) for result in results if result.changed), end="")
        print(report.words(results, arguments.write))
    counts = report.counted(results)
    if counts["errors"]:
        return 2
    return int(counts["person"] > 0 or (arguments.check and counts["changed"] > 0))


def migrate(paths: Sequence[Path], to: str) -> list[FileResult]:
    """Plans the changes, file by file. Writes nothing."""
    missing = [path for path in paths if not path.exists()]
    results = [FileResult(str(path), error="no such file or directory") for path in missing]
    parsed: list[tuple[FileResult, Parsed]] = []
    for path in files.find([path for path in paths if path not in missing]):
        result = FileResult(str(path))
        results.append(result)
        if (tree := _read(path, result)) is not None:
            parsed.append((result, tree))
    from ampctx_apex.migrate import to_ampctx, to_torch

    helpers = to_torch.helpers(tree for _, tree in parsed) if to == "torch" else []
    for result, tree in parsed:
        edits, result.findings = to_ampctx.plan(tree) if to == "ampctx" else to_torch.plan(tree, helpers)
        after = report.apply(result.before, edits)
        if reason := _not_python(after):
            result.fail(f"the result would not be Python ({reason}). The file stays as it is; please report this")
        else:
            result.edits, result.after = edits, after
    return results


def _read(path: Path, result: FileResult) -> Parsed | None:
    """The tree of a file that mentions apex, else None. Errors go into ``result``."""
    import libcst

    from ampctx_apex.migrate.analysis import MENTION, Parsed

    try:
        data = path.read_bytes()
        if path.suffix == ".ipynb":
            result.findings = _notebook(result.path, data.decode("utf-8"))
            return None
        if not MENTION.search(data):
            return None
        text = files.decode(data).text
        with warnings.catch_warnings():
            # The file may have strings with invalid escapes.
            warnings.simplefilter("ignore")
            tree = Parsed(result.path, text)
    except libcst.ParserSyntaxError as error:
        result.error = f"line {error.raw_line}: cannot be parsed: {error.message}"
        return None
    except (OSError, SyntaxError, UnicodeDecodeError, RecursionError) as error:
        result.error = f"cannot be read: {error}"
        return None
    result.before = result.after = text
    return tree


def _notebook(path: str, text: str) -> list[Finding]:
    # Imported here: --help works without torch.
    from ampctx_apex.install import ROOTS

    message = "a notebook: edit its cells by hand"
    found = []
    for match in re.finditer(rf"\b(?:import|from)\s+({'|'.join(ROOTS)})\b", text):
        starts = report.line_starts(text[: match.start()])
        column = match.start() - starts[-1] + 1
        name = match[1]
        found.append(Finding(path, len(starts), column, name, None, "person", message, report.link(name)))
    return found


def _not_python(text: str) -> str | None:
    """The error of a text that is not Python, else None."""
    try:
        with warnings.catch_warnings():
            # The file may have strings with invalid escapes.
            warnings.simplefilter("ignore")
            ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        return str(error)
    return None


def _write(result: FileResult) -> None:
    if not result.changed:
        return
    path = Path(result.path)
    try:
        form = files.decode(path.read_bytes())
        if form.text != result.before:
            raise OSError("the file changed while ampctx migrate was running")
        files.write(path, form.encode(result.after))
    except (OSError, SyntaxError, UnicodeError) as error:
        result.fail(f"cannot be written: {error}")
