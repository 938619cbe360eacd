"""Runs examples as a user does, in a process of their own: a fresh one, or a fork of one that has imported torch.

What they refuse, and variants, run in this process.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from ampctx import amp

ROOT = Path(__file__).resolve().parents[2]


def run(script: str, *arguments: object, cwd: Path, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, "-W", "error", *torchrun, str(ROOT / "examples" / script), *map(str, arguments)]
    # The package of this tree, not another that is installed.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL
    )


class Forks:
    """Runs examples in forks, which spares each of them seconds of imports. For Linux, as the package is."""

    def __init__(self, server: subprocess.Popen[str]) -> None:
        self._server = server

    def run(self, script: str, *arguments: object, cwd: Path) -> tuple[int, str]:
        """Exit status, and stdout and stderr together."""
        argv = [script, *map(str, arguments)]
        code = (
            f"import os, runpy, sys; os.chdir({str(cwd)!r}); sys.argv = {argv!r}; "
            f"sys.path.insert(0, {str(ROOT / 'examples')!r}); "
            f"runpy.run_path({str(ROOT / 'examples' / script)!r}, run_name='__main__')"
        )
        self._server.stdin.write(json.dumps([script, code]) + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        assert answer, f"the process that forks ended with {self._server.wait()}"
        return tuple(json.loads(answer))


@contextmanager
def forks() -> Iterator[Forks]:
    command = [sys.executable, "-W", "error", str(ROOT / "tests" / "block_server.py")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT, env=environment) as server:
        yield Forks(server)
        server.stdin.close()


def _main(script: str, arguments: tuple[object, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    threads = torch.get_num_threads()  # the examples set it
    try:
        runpy.run_path(str(ROOT / "examples" / script), run_name="__main__")
    except SystemExit as stop:
        if stop.code:
            raise
    finally:
        torch.set_num_threads(threads)
        amp.reset()


def refusal(script: str, *arguments: object, cwd: Path, monkeypatch, capsys) -> str:
    """What an example says on stderr when it exits with code 2; in this process, as no training is reached."""
    monkeypatch.chdir(cwd)
    with pytest.raises(SystemExit) as exit:
        _main(script, arguments, monkeypatch)
    assert exit.value.code == 2
    return capsys.readouterr().err


def output(script: str, *arguments: object, monkeypatch, capsys) -> str:
    """What an example prints, in this process: for variants of a run that had one of its own."""
    with torch.random.fork_rng():
        _main(script, arguments, monkeypatch)
    return capsys.readouterr().out
