"""Runs code blocks, each in a fork of one process that has imported torch and ampctx already.

Lines of JSON on stdin, ``[name, code]``; for each a line on stdout, ``[exit status, what it wrote to stderr]``.
"""

import faulthandler
import json
import os
import sys
import tempfile
import traceback
import warnings

import torch

import ampctx  # noqa: F401 - what a fork need not import again

# torch imports much more of itself with the first optimizer.
torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])


def _run(name: str, code: str, scope: dict) -> int:
    try:
        exec(compile(code, name, "exec"), scope)
    except SystemExit as stop:
        return int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _forked(name: str, code: str) -> tuple[int, str]:
    with tempfile.TemporaryFile() as errors:
        with warnings.catch_warnings():
            # Python 3.12 warns of forks beside threads. Those of numpy's BLAS wait for work, and hold nothing.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the next blocks are there
            os.dup2(errors.fileno(), 2)
            os.dup2(2, 1)  # and the answers here
            faulthandler.dump_traceback_later(120, exit=True)
            torch.manual_seed(0)  # a loss overflows by chance in one run of a hundred
            # Nothing of the block is freed: gloo's process group joins a thread that may be waiting for the GIL.
            scope = {"__name__": "__main__"}
            status = _run(name, code, scope)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        errors.seek(0)
        return status, errors.read().decode(errors="replace")


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(_forked(*json.loads(line))), flush=True)
