"""Python processes with the packages of this tree on their path."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = os.pathsep.join([str(ROOT), str(ROOT / "ampctx-apex")])


def python(*arguments, cwd=None, stdin=None, **environment):
    """The finished ``python <arguments>``; warnings are errors."""
    env = {k: v for k, v in os.environ.items() if k != "AMPCTX_APEX"}
    env |= {"PYTHONPATH": HERE, "OMP_NUM_THREADS": "1"} | environment
    command = [sys.executable, "-W", "error", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=env, input=stdin, capture_output=True, text=True, timeout=600)


def output(*arguments, **options):
    """What ``python <arguments>`` prints. It succeeds, without a word on stderr."""
    done = python(*arguments, **options)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout
