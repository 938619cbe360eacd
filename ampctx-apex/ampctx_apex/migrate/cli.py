"""``ampctx-apex migrate``: its command line, and the loop over files."""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from ampctx_apex.migrate import files, report
from ampctx_apex.migrate.report import FileResult, Finding

EPILOG = """\
Names without a public ampctx name keep their apex import, so run the program
with ampctx-apex installed.

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
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--write", action="store_true", help="apply the changes; each file is replaced atomically")
    mode.add_argument("--check", action="store_true", help="print no diff; exit with 1 if a file would change")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command and returns its exit code."""
    try:
        import libcst  # noqa: F401
    except ImportError as error:
        print(f"ampctx-apex migrate: needs libcst ({error}). Install it: pip install libcst", file=sys.stderr)
        return 2
    results = migrate(arguments.paths)
    for result in results:
        if arguments.write and result.changed:
            _write(result)
    if arguments.json:
        print(json.dumps(report.as_json(results, arguments.write), indent=2))
    else:
        if not arguments.write and not arguments.check:
            # As bytes: files of other encodings have hunks in theirs.
            sys.stdout.flush()
            sys.stdout.buffer.write(b"".join(result.diff() for result in results))
            sys.stdout.buffer.flush()
        print("\n".join(report.lines(results, arguments.write)))
    counts = report.counted(results)
    return 2 if counts["errors"] else int(counts["manual"] > 0 or (arguments.check and counts["changed"] > 0))


def migrate(paths: Sequence[Path]) -> list[FileResult]:
    """Plans the changes, file by file. Writes nothing."""
    missing = [path for path in paths if not path.exists()]
    results = [FileResult(str(path), error="no such file or directory") for path in missing]
    with warnings.catch_warnings():
        # The files may have strings with invalid escapes.
        warnings.simplefilter("ignore")
        return results + [_migrated(path) for path in files.find([path for path in paths if path not in missing])]


def _migrated(path: Path) -> FileResult:
    # Imported here: the command line works without libcst.
    from libcst import ParserSyntaxError

    from ampctx_apex.migrate import rewrite

    result = FileResult(str(path))
    try:
        data = result.before = result.after = path.read_bytes()
        if path.suffix == ".ipynb":
            result.findings = list(_notebook(result.path, data.decode(), rewrite.ROOTS))
        elif rewrite.MENTION.search(data):
            result.after, result.findings = rewrite.rewritten(result.path, data)
    except ParserSyntaxError as error:
        result.fail(f"line {error.raw_line}: cannot be parsed: {error.message}")
    except (OSError, SyntaxError, UnicodeDecodeError, RecursionError) as error:
        result.fail(f"cannot be read: {error}")
    try:
        if result.changed:
            ast.parse(result.after)
    except (SyntaxError, ValueError, RecursionError) as error:
        result.fail(f"the result would not be Python ({error}). The file stays as it is; please report this")
    return result


def _notebook(path: str, text: str, roots: set[str]) -> Iterator[Finding]:
    for match in re.finditer(rf"\b(?:import|from)\s+({'|'.join(sorted(roots))})\b", text):
        line, column = text.count("\n", 0, match.start()) + 1, match.start() - text.rfind("\n", 0, match.start())
        yield Finding(path, line, column, match[1], None, "manual", "A notebook: edit its cells by hand.")


def _write(result: FileResult) -> None:
    try:
        if Path(result.path).read_bytes() != result.before:
            raise OSError("the file changed while ampctx-apex migrate was running")
        files.write(Path(result.path), result.after)
    except OSError as error:
        result.fail(f"cannot be written: {error}")
