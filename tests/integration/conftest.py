"""Runs examples: in forks of one process that has imported torch, and in this process."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from example_runs import ROOT

from ampctx import amp

EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="session")
def in_fork():
    """Runs an example as a user does: its exit status, and stdout and stderr together. For Linux, as the package is."""
    command = [sys.executable, "-W", "error", str(ROOT / "tests" / "block_server.py")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT, env=environment) as server:

        def in_fork(script: str, *arguments: object, cwd: Path) -> tuple[int, str]:
            argv = [script, "--device", "cpu", *map(str, arguments)]
            code = (
                f"import os, runpy, sys; os.chdir({str(cwd)!r}); sys.argv = {argv!r}; "
                f"sys.path.insert(0, {str(EXAMPLES)!r}); "
                f"runpy.run_path({str(EXAMPLES / script)!r}, run_name='__main__')"
            )
            server.stdin.write(json.dumps([script, code]) + "\n")
            server.stdin.flush()
            answer = server.stdout.readline()
            assert answer, f"the process that forks ended with {server.wait()}"
            return tuple(json.loads(answer))

        yield in_fork
        server.stdin.close()


@pytest.fixture(scope="session")
def forked(in_fork):
    """What an example prints, and nothing else: no warning."""

    def forked(script: str, *arguments: object, cwd: Path) -> str:
        status, printed = in_fork(script, *arguments, cwd=cwd)
        assert status == 0, printed
        return printed

    return forked


@pytest.fixture
def main(monkeypatch, tmp_path):
    """Runs an example in this process: for variants of a run that had one of its own, and for what it refuses."""

    def main(script: str, *arguments: object) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        monkeypatch.syspath_prepend(str(EXAMPLES))
        threads = torch.get_num_threads()  # the examples set it
        try:
            with torch.random.fork_rng():
                runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        except SystemExit as stop:
            if stop.code:
                raise
        finally:
            torch.set_num_threads(threads)
            amp.reset()

    return main


@pytest.fixture
def here(main, capsys):
    """What an example prints."""

    def here(script: str, *arguments: object) -> str:
        # That one has no tensors on a device.
        main(script, *(() if script == "custom_functions.py" else ("--device", "cpu")), *arguments)
        return capsys.readouterr().out

    return here


@pytest.fixture
def refusal(main, capsys):
    """What an example says on stderr when it exits with code 2."""

    def refusal(script: str, *arguments: object) -> str:
        with pytest.raises(SystemExit) as exit:
            main(script, *arguments)
        assert exit.value.code == 2
        return capsys.readouterr().err

    return refusal
