"""What the tests of ``ampctx migrate`` share."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from ampctx_apex.migrate import cli

ROOT = Path(__file__).resolve().parents[2]


def dedent(text):
    return textwrap.dedent(text).lstrip("\n")


def migrated(tmp_path, source, to="ampctx"):
    """The result for one file of this text, which must be the same when the result is migrated again."""
    path = tmp_path / "script.py"
    path.write_text(dedent(source))
    (result,) = cli.migrate([path], to)
    assert result.error is None
    path.write_text(result.after)
    (again,) = cli.migrate([path], to)
    assert not again.changed, again.after
    return result


def run(*arguments, cwd=None, **environment):
    """``python <arguments>`` with this ampctx."""
    return subprocess.run(
        [sys.executable, "-W", "error", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
    )
