"""What the tests of ``ampctx-apex migrate`` share."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from ampctx_apex.migrate import cli

ROOT = Path(__file__).resolve().parents[2]


def migrated(tmp_path, source):
    """The new text of a file, and its findings. Another run must change nothing more."""
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(source).lstrip("\n"))
    (result,) = cli.migrate([path])
    assert result.error is None
    path.write_bytes(result.after)
    (again,) = cli.migrate([path])
    assert not again.changed, again.after
    return result.after.decode(), result.findings


def run(*arguments, cwd=None, **environment):
    """``python <arguments>`` with this ampctx."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "ampctx-apex")])
    return subprocess.run(
        [sys.executable, "-W", "error", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment},
    )
